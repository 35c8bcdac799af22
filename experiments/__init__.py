"""The paper's figures and tables, one file each: `python -m experiments.sinusoid`, or all by `make reproduce`."""
