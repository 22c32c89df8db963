"""New weights for a running engine: checked before they are taken, shared where they can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from gymllm.errors import ModelError
from gymllm_trainers.compilation import compile_ahead
from gymllm_trainers.models.decoder import Decoder, LoRAParam

Tree = Any
"""A pytree of arrays."""
Path = tuple[Any, ...]
"""Names on the way to a parameter."""
Program = Callable[..., Any]
"""Something compiled, or compiled at its first call."""


class Publisher:
    """Turns what a trainer publishes into what the engine's programs take."""

    def __init__(
        self, graph: nnx.GraphDef[Decoder], state: Tree, *, compute_dtype: DTypeLike
    ) -> None:
        """Takes the first weights, which are not checked for NaN: who loads a model has looked at it.

        Args:
            graph: The decoder's structure.
            state: Its parameters.
            compute_dtype: What the engine keeps weights in.
        """
        self._dtype = jnp.dtype(compute_dtype)
        self._cast: Program = jax.jit(lambda leaves: [leaf.astype(self._dtype) for leaf in leaves])
        self._finite: Program = jax.jit(_finite)
        self._compiled: dict[tuple[Path, ...], Program] = {}
        self._casts: dict[tuple[tuple[Path, jnp.dtype], ...], Program] = {}
        given = _flat(state)
        self._given = {path: _abstract(variable[...]) for path, variable in given.items()}
        self._shardings = {path: variable[...].sharding for path, variable in given.items()}
        self._flat = self._converted(given)

    def compile(self) -> None:
        """Compiles what all parameters take, and the adapters alone if there are any: a cast where those that
        were there at first needed one, and the check."""
        every = tuple(self._flat)
        adapters = tuple(path for path in every if isinstance(self._flat[path], LoRAParam))
        for paths in filter(None, (every, adapters)):
            leaves = [self._flat[path][...] for path in paths]
            self._compiled[paths] = compile_ahead(self._finite, leaves)
            others = {
                path: self._given[path] for path in paths if self._is_other(self._given[path])
            }
            if others:
                self._casts[_typed(others)] = compile_ahead(self._cast, list(others.values()))

    @property
    def state(self) -> Tree:
        """The weights that were taken last."""
        return nnx.from_flat_state(self._flat.items())

    def check(self, state: Tree) -> Tree:
        """Checks weights and takes them.

        Args:
            state: All of the decoder's parameters, or some (its adapters alone): the rest stays.

        Returns:
            All of them, as the programs take them.

        Raises:
            ModelError: Not an `nnx.State`, another name or shape, or a number is NaN or infinite; nothing is
                taken.
        """
        if not isinstance(state, nnx.State):
            raise ModelError(
                f"published weights must be an nnx.State, got {type(state).__name__}: publish "
                "`nnx.state(decoder)`, or of its adapters alone `nnx.state(decoder, LoRAParam)`."
            )
        # In the engine's order, which is that of what was compiled.
        found = _flat(state)
        given = {path: found.pop(path) for path in self._flat if path in found} | found
        for path, variable in given.items():
            own = self._flat.get(path)
            name = "/".join(map(str, path))
            if own is None:
                raise ModelError(
                    f"published weights hold {name!r}, which the engine's model doesn't have: it was made "
                    "from another decoder."
                )
            array: object = variable.get_value() if isinstance(variable, nnx.Variable) else variable
            if not isinstance(array, Array) or not jnp.issubdtype(array.dtype, jnp.floating):
                kind = array.dtype if isinstance(array, Array) else type(array).__name__
                raise ModelError(
                    f"published weights: {name!r} must be a jax.Array of floats, got {kind}."
                )
            if array.is_deleted():
                raise ModelError(
                    f"published weights: {name!r} was deleted, or donated to a program. Publish what that "
                    "program returned."
                )
            if own[...].shape != variable[...].shape:
                raise ModelError(
                    f"published weights: {name!r} has shape {list(variable[...].shape)}, the engine's model "
                    f"has {list(own[...].shape)}."
                )
        if not given:
            raise ModelError("published weights are empty: give nnx.state of the decoder.")
        # Placed first: what is cast then lies as it did when the casts were compiled.
        placed = {path: self._placed(path, variable) for path, variable in given.items()}
        converted = self._converted(placed)
        arrays = {path: variable[...] for path, variable in converted.items()}
        finite = jax.device_get(
            self._compiled.get(tuple(arrays), self._finite)(list(arrays.values()))
        )
        bad = [
            "/".join(map(str, path)) for path, good in zip(arrays, finite, strict=True) if not good
        ]
        if bad:
            raise ModelError(
                f"published weights are NaN or infinite in {len(bad)} of {len(arrays)} parameters, such as "
                f"{bad[0]!r}: refused, the engine goes on with those it has."
            )
        self._flat |= converted
        return self.state

    def _placed(self, path: Path, variable: Any) -> Any:
        """The same where the engine has it; what is there already is not copied."""
        sharding = self._shardings[path]
        if variable[...].sharding.is_equivalent_to(sharding, variable[...].ndim):
            return variable
        return variable.replace(jax.device_put(variable[...], sharding))

    def _converted(self, flat: dict[Path, Any]) -> dict[Path, Any]:
        """The same with every float in the engine's dtype; what is in it already is not copied."""
        other = {
            path: variable[...] for path, variable in flat.items() if self._is_other(variable[...])
        }
        if not other:
            return flat
        program = self._casts.get(_typed(other), self._cast)
        cast = dict(zip(other, program(list(other.values())), strict=True))
        return {
            path: variable.replace(cast[path]) if path in cast else variable
            for path, variable in flat.items()
        }

    def _is_other(self, leaf: Array | jax.ShapeDtypeStruct) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != self._dtype


def _abstract(leaf: Array) -> jax.ShapeDtypeStruct:
    """What a program is compiled for: the array without its numbers, where it lies on a mesh if it does."""
    sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _typed(
    leaves: Mapping[Path, Array | jax.ShapeDtypeStruct],
) -> tuple[tuple[Path, jnp.dtype], ...]:
    return tuple((path, leaf.dtype) for path, leaf in leaves.items())


def _flat(state: Tree) -> dict[Path, Any]:
    """The parameters by their paths, in variables of our own: the caller may write to his."""
    return dict(nnx.to_flat_state(jax.tree.map(lambda leaf: leaf, state)))


def _finite(leaves: list[Array]) -> list[Array]:
    # A sum is NaN or infinite if any term is: one pass, and nothing of the leaf's size is made. Squares would
    # overflow; a sum of finite float32 weights does not.
    return [jnp.isfinite(jnp.sum(leaf.astype(jnp.float32))) for leaf in leaves]
