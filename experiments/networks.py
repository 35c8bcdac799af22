"""The paper's networks for CIFAR-10: their weights, training and activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Architecture(NamedTuple):
    """A network like those of the paper's table 5: 3×3 convolutions, each with 2×2 pooling, and one dense layer."""

    channels: tuple[int, ...]
    strides: tuple[int, ...]
    dense: int
    #: Layers whose activations are compared.
    harvested: tuple[str, ...]
    #: Training steps, the steps at which the weights are kept, and the first step size.
    steps: int
    kept: tuple[int, ...]
    rate: float = 1e-3


#: By the number of activations of two networks together: the paper's two, and a similar one with over a million.
NETWORKS = {
    2_048: Architecture((64, 32), (2, 1), 512, ("conv2", "dense"), 25_000, (0, 100, 1000, 5000, 10_000)),
    116_736: Architecture(
        (128, 256, 512), (1, 1, 1), 1024, ("conv1", "conv2", "conv3", "dense"), 10_000, (0, 100, 1000, 5000)
    ),
    1_000_448: Architecture(
        (1152, 2304, 3456), (1, 1, 1), 2560, ("conv1", "conv2", "conv3", "dense"), 600, (0, 60), 2e-4
    ),
}
#: Images in one forward pass; more would need too much memory for the intermediate layers.
AT_ONCE = 256


def init(net: Architecture, key: Any) -> dict[str, Any]:
    """He initialisation, with zero biases."""
    sizes, params, size = (3, *net.channels), {}, 32
    for i, (a, b, stride) in enumerate(zip(sizes, net.channels, net.strides, strict=False), start=1):
        key, now = jax.random.split(key)
        params[f"conv{i}"] = jax.random.normal(now, (3, 3, a, b)) * (2 / (9 * a)) ** 0.5, jnp.zeros(b)
        size //= 2 * stride
    for name, a, b in (("dense", size**2 * net.channels[-1], net.dense), ("out", net.dense, 10)):
        key, now = jax.random.split(key)
        params[name] = jax.random.normal(now, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b)
    return params


def forward(net: Architecture, params: dict[str, Any], images: jax.Array) -> dict[str, jax.Array]:
    """The activations of every layer on images of bytes."""
    x, out = images.astype(jnp.float32) / 127.5 - 1, {}
    for i, stride in enumerate(net.strides, start=1):
        W, b = params[f"conv{i}"]
        x = jax.lax.conv_general_dilated(x, W, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        n, side = x.shape[:2]
        x = jax.nn.relu(x + b).reshape(n, side // 2, 2, side // 2, 2, -1).max((2, 4))
        out[f"conv{i}"] = x
    W, b = params["dense"]
    out["dense"] = jax.nn.relu(x.reshape(len(x), -1) @ W + b)
    W, b = params["out"]
    return {**out, "out": out["dense"] @ W + b}


def train(net: Architecture, images: jax.Array, labels: jax.Array, seed: int = 0) -> dict[int, dict[str, Any]]:
    """The weights at the kept steps and at the last step."""
    optimizer = optax.adam(optax.cosine_decay_schedule(net.rate, net.steps))
    params = init(net, jax.random.key(seed))
    state = optimizer.init(params)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(forward(net, params, x)["out"], y).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, key: Any, data: Any) -> Any:
        chosen = jax.random.randint(key, (256,), 0, len(data[0]))
        change, state = optimizer.update(jax.grad(loss)(params, data[0][chosen], data[1][chosen]), state, params)
        return optax.apply_updates(params, change), state

    found = {}
    keys = jax.random.split(jax.random.key(seed + 1), net.steps)
    for t in range(net.steps + 1):
        if t in (*net.kept, net.steps):
            found[t] = jax.tree.map(jnp.copy, params)
        if t < net.steps:
            params, state = step(params, state, keys[t], (images, labels))
    return found


def accuracy(net: Architecture, params: Any, images: jax.Array, labels: jax.Array) -> float:
    run = jax.jit(lambda x: forward(net, params, x)["out"].argmax(1))
    guesses = [run(images[lo : lo + 1000]) for lo in range(0, len(images), 1000)]
    return float((jnp.concatenate(guesses) == labels).mean())


class Images:
    """Full batches of images on the device, in a new order each time."""

    def __init__(self, images: jax.Array, batch: int, seed: int = 0):
        self.images, self.batch, self.rng = images, batch, np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.images) // self.batch

    def __iter__(self) -> Iterator[jax.Array]:
        # The same images every time, so that the exact answer is that of these images.
        order = self.rng.permutation(len(self) * self.batch)
        for chosen in np.split(order, len(self)):
            yield self.images[np.sort(chosen)]


@partial(jax.jit, static_argnums=0)
def harvest(net: Architecture, params: Any, images: jax.Array) -> dict[str, jax.Array]:
    """The compared activations, (images, units) of each layer."""

    def one(x: jax.Array) -> dict[str, jax.Array]:
        found = forward(net, params, x)
        return {name: found[name].reshape(len(x), -1) for name in net.harvested}

    if len(images) % AT_ONCE:
        return one(images)
    parts = jax.lax.map(one, images.reshape(-1, AT_ONCE, *images.shape[1:]))
    return jax.tree.map(lambda x: x.reshape(len(images), -1), parts)


class Pair:
    """The activations of two networks on the same images: a stream for CCA that can be read again."""

    def __init__(self, net: Architecture, a: Any, b: Any, images: Images):
        self.net, self.both, self.images = net, (a, b), images

    def __iter__(self) -> Iterator[tuple[dict[str, jax.Array], ...]]:
        return (tuple(harvest(self.net, params, x) for params in self.both) for x in self.images)
