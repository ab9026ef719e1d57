"""A site that was read in one module, moved to another module of the same kind."""

from __future__ import annotations

from dataclasses import replace

from headscope.heads import Site


def relative(target: str, origin: str) -> tuple[int, str]:
    """How to reach one module path from another: levels up, then a path down."""
    there, here = target.split("."), origin.split(".")
    common = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    return len(here) - common, ".".join(there[common:])


def moved(site: Site, path: str, output: str) -> Site:
    """The same site in another module of the same kind: every path starts from that module instead."""
    origin = site.module
    if origin == path:
        return site

    def move(target: str) -> str:
        up, down = relative(target, origin)
        parts = path.split(".")
        kept = parts[: len(parts) - up]
        return ".".join([*kept, down] if down else kept)

    slices = tuple(replace(piece, module=move(piece.module)) for piece in site.slices)
    coupled, shared = (tuple(move(name) for name in names) for names in (site.coupled, site.shared))
    return replace(site, module=path, output=output, slices=slices, coupled=coupled, shared=shared)
