"""The problems as scikit-learn estimators."""

from eigenstream.estimators.ica import ICA
from eigenstream.estimators.lda import LDA
from eigenstream.estimators.merging import merge
from eigenstream.estimators.model_files import load
from eigenstream.estimators.multiview import MultiviewCCA
from eigenstream.estimators.pairs import CCA, PLS
from eigenstream.estimators.pca import PCA
from eigenstream.estimators.permutation import PermutationTest, permutation_test
from eigenstream.estimators.spectral import SpectralClustering, SpectralEmbedding

__all__ = [
    "CCA",
    "ICA",
    "LDA",
    "PCA",
    "PLS",
    "MultiviewCCA",
    "PermutationTest",
    "SpectralClustering",
    "SpectralEmbedding",
    "load",
    "merge",
    "permutation_test",
]
