"""Shape types for signatures: jaxtyping's where it is installed, so that tests run them; plain tensors elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class Float:
            """`Float[Tensor, "batch head"]` means just `Tensor`."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Int = Float

__all__ = ["Bool", "Float", "Int"]
