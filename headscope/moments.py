"""Linear CKA of what heads write, streamed: from cross-moments of head outputs z, or from a sample of tokens.

With `X_a = Z_a W_a`, features centred over all tokens, `CKA = ‖X_aᵀ X_b‖² / (‖X_aᵀ X_a‖ ‖X_bᵀ X_b‖)` and
`‖X_aᵀ X_b‖² = tr(M_a C_ab M_b C_ba)` with `M = W Wᵀ` and `C_ab = Z_aᵀ Z_b`: the matrices W come in at the end, and no
activation is kept. `CrossMoments` is exact and holds C of every two sites with the same queries; where these take more
than `MOMENT_BYTES`, `TokenSample` estimates the same from a uniform sample of the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.hsic import Estimate
from headscope.losses import uniforms, wide
from headscope.measures import Outputs, PairValues
from headscope.pairs import HeadSpace, double, normalised
from headscope.shapes import Float
from headscope.states import State, within

MOMENT_BYTES = 2**30
"""Cross-moments held at most, in float64: about 16,000 channels of heads, such as 250 heads of 64."""
SAMPLE_BYTES = 2**30
"""Head outputs of sampled tokens held at most."""
SAMPLE = 4096
"""Tokens in the sample, where that fits."""
LEAST_SAMPLE = 128
GROUP = 64
"""Tokens in one estimate of HSIC (Hilbert-Schmidt independence criterion)."""


def moment_bytes(space: HeadSpace) -> int:
    """The size of all cross-moments of two sites of one stack."""
    widths = [site.n_heads * site.d_value for site in space.sites]
    total = 0
    for i, site in enumerate(space.sites):
        total += sum(widths[i] * widths[j] for j in range(i + 1) if space.sites[j].id.stack == site.id.stack)
    return total * 8


class CrossMoments:
    """Sums of z and of products of two sites' z, in float64.

    Each site's z is shifted by its mean in the first batch, which centring takes out again: products of a large mean
    would cost digits.
    """

    def __init__(self, space: HeadSpace) -> None:
        self._space = space
        self._shift: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._products: dict[tuple[int, int], Tensor] = {}
        self._counts: dict[int, int] = {}
        self._eps = 0.0

    def add(self, part: Outputs) -> None:
        """Add the tokens of a part."""
        shifted: dict[int, Tensor] = {}
        for site, outputs in zip(part.sites, part.outputs, strict=True):
            if not len(outputs):
                return
            values = wide(outputs).flatten(1)  # [token head*d_value]
            self._eps = max(self._eps, torch.finfo(outputs.dtype).eps)
            if site not in self._shift:
                self._shift[site] = values.mean(dim=0)
            shifted[site] = values - self._shift[site]
            self._sums[site] = self._sums.get(site, 0) + double(shifted[site]).sum(dim=0)
            self._counts[site] = self._counts.get(site, 0) + len(values)
        for a, left in shifted.items():
            for b, right in shifted.items():
                if a <= b:
                    product = double(left.T @ right)
                    before = self._products.get((a, b))
                    self._products[a, b] = product if before is None else before.add_(product)

    def state(self) -> State:
        """Sums, products and shifts by the number of the site or of both sites."""
        found: State = {"eps": torch.tensor(self._eps, dtype=torch.float64)}
        for site, shift in self._shift.items():
            found[f"shift/{site}"], found[f"sum/{site}"] = double(shift).cpu(), self._sums[site].cpu()
            found[f"count/{site}"] = torch.tensor(float(self._counts[site]), dtype=torch.float64)
        return found | {f"product/{a}/{b}": product.cpu() for (a, b), product in self._products.items()}

    def absorb(self, state: State) -> None:
        """Add the sums of other tokens, moved from their shift to the one here.

        With d the step between both, `Σ (z+d)(z+d)ᵀ = Σ zzᵀ + Σz dᵀ + d (Σz + n d)ᵀ`.
        """
        self._eps = max(self._eps, float(state["eps"]))
        sums, steps = ({int(site): one for site, one in within(state, name).items()} for name in ("sum", "shift"))
        counts = {int(site): int(one) for site, one in within(state, "count").items()}
        moved: dict[int, Tensor] = {}
        for site, shift in steps.items():
            steps[site] = shift - self._shift.setdefault(site, shift)
            moved[site] = sums[site] + counts[site] * steps[site]
            self._sums[site] = self._sums.get(site, 0) + moved[site]
            self._counts[site] = self._counts.get(site, 0) + counts[site]
        for key, product in within(state, "product").items():
            a, b = map(int, key.split("/"))
            if bool(steps[a].any() or steps[b].any()):
                product.addr_(sums[a], steps[b]).addr_(steps[a], moved[b])
            before = self._products.get((a, b))
            self._products[a, b] = product if before is None else before.add_(product)

    @property
    def size(self) -> int:
        """Bytes of the products, which are nearly all."""
        return moment_bytes(self._space)

    def finish(self) -> PairValues:
        """CKA of every pair; NaN for heads that write the same at every token, up to rounding, or nothing."""
        squares = torch.full_like(self._space.blank(), torch.nan)
        roots = {site: root for site in self._sums if (root := self._root(site)) is not None}
        for (a, b), product in self._products.items():
            if a not in roots or b not in roots:
                continue
            centred = product - torch.outer(self._sums[a], self._sums[b]) / self._counts[a]
            blocks = centred.view(len(roots[a]), -1, len(roots[b]), roots[b].shape[2])
            written = torch.einsum("apd,adbe,bqe->abpq", roots[a], blocks, roots[b])  # a, b: heads; p, q, d, e: widths
            found = written.square().sum(dim=(2, 3)).cpu()
            rows, columns = self._space.places(a), self._space.places(b)
            squares[rows[:, None], columns] = found
            squares[columns[:, None], rows] = found.T
            if a == b:
                self._drop_constant(a, roots[a], blocks, squares)
        return PairValues(normalised(squares).clamp(0, 1))

    def _root(self, site: int) -> Float[Tensor, "head rank d_value"] | None:
        """R with `Rᵀ R = W Wᵀ`, of each head."""
        output = self._space.weights(self._space.sites[site]).output
        if output is None:
            return None
        return torch.linalg.qr(double(output).transpose(1, 2), mode="r").R.to(self._sums[site].device)

    def _drop_constant(self, site: int, root: Tensor, blocks: Tensor, squares: Tensor) -> None:
        """Make heads of no variance undefined: what is left of them is rounding."""
        own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [head d_value d_value]
        spread = torch.einsum("apd,ade,ape->a", root, own, root)  # a: head; p, d, e: widths
        mean = double(self._shift[site]) + self._sums[site] / self._counts[site]
        level = torch.einsum("apd,ad->ap", root, mean.view(len(root), -1)).square().sum(dim=1) * self._counts[site]
        constant = (spread <= (4 * self._eps) ** 2 * (level + spread)).cpu()
        places = self._space.places(site)[constant]
        squares[places, places] = torch.nan


@dataclass
class _Held:
    """Sampled tokens of one site: a priority for each slot (infinite: empty), and `[slot head d_value]`."""

    priority: Tensor
    outputs: Tensor

    def take(self, priority: Tensor, outputs: Tensor) -> None:
        """Keep the tokens of least priority, of those held and of these."""
        size = len(self.priority)
        chosen = torch.zeros(size + len(priority), dtype=torch.bool)
        chosen[torch.cat([self.priority, priority]).topk(size, largest=False).indices] = True
        slots, taken = (~chosen[:size]).nonzero()[:, 0], chosen[size:].nonzero()[:, 0]
        self.priority[slots] = priority[taken]
        self.outputs[slots.to(outputs.device)] = wide(outputs[taken.to(outputs.device)])


class TokenSample:
    """A uniform sample of tokens, and linear CKA from unbiased estimates of HSIC on groups of 64 of them.

    Tokens are drawn by a number that depends on the example and the position only, so that batching changes nothing.
    (Groups of tokens as they come would not do: neighbours stand in one text and vary less than all.) The standard
    error is that of the mean over groups, carried through the quotient (delta method). Values are cut to [0, 1].
    Song et al. 2012, Feature Selection via Dependence Maximization; Nguyen et al. 2021, Do Wide and Deep Networks
    Learn the Same Things?
    """

    def __init__(self, space: HeadSpace) -> None:
        self._space = space
        self._held: dict[int, _Held] = {}
        widths = sum(site.n_heads * site.d_value for site in space.sites)
        self._size = max(LEAST_SAMPLE, min(SAMPLE, SAMPLE_BYTES // (8 * widths)))

    def add(self, part: Outputs) -> None:
        """Take the tokens of a part that belong to the sample so far, in place of others that then do not."""
        priority = _priorities(part)
        for site, outputs in zip(part.sites, part.outputs, strict=True):
            if site not in self._held:
                empty = torch.full((self._size,), math.inf, dtype=torch.float64)
                self._held[site] = _Held(empty, wide(outputs).new_zeros(self._size, *outputs.shape[1:]))
            self._held[site].take(priority, outputs)

    def state(self) -> State:
        """The tokens held by the number of the site; their values stay in the type in which they were multiplied."""
        found: State = {}
        for site, held in self._held.items():
            found[f"priority/{site}"], found[f"outputs/{site}"] = held.priority, held.outputs.cpu()
        return found

    def absorb(self, state: State) -> None:
        """Take those of other tokens that belong to the sample of all."""
        for key, priority in within(state, "priority").items():
            site, outputs = int(key), state[f"outputs/{key}"]
            if site in self._held:
                self._held[site].take(priority, outputs)
            else:
                self._held[site] = _Held(priority, outputs)

    @property
    def size(self) -> int:
        """Bytes of the sample in float32."""
        return 4 * self._size * sum(site.n_heads * site.d_value for site in self._space.sites)

    def finish(self) -> PairValues:
        """CKA of every pair with its standard error; NaN for heads whose own HSIC is not above zero."""
        values = torch.full_like(self._space.blank(), torch.nan)
        error = values.clone()
        notes: list[str] = []
        for sites in self._same_tokens():
            priority = self._held[sites[0]].priority
            order = priority.argsort()[: int(priority.isfinite().sum())]
            size = min(GROUP, len(order) // 2)
            known = {site: matrix for site in sites if (matrix := self._inner(site)) is not None}
            if not known or size < 4:  # HSIC needs four tokens, its error two groups
                continue
            estimate = Estimate(size)
            for group in order[: len(order) // size * size].split(size):
                estimate.add(torch.cat([self._kernels(site, matrix, group) for site, matrix in known.items()]))
            places = self._space.places_of(tuple(known))
            found = estimate.finish()
            assert found.error is not None
            values[places[:, None], places], error[places[:, None], places] = found.values, found.error
            notes.append(
                f"output is estimated from {estimate.count * size:,} tokens (mean standard error "
                f"{float(found.error.nanmean()):.2g}): exact moments take {moment_bytes(self._space) / 2**30:.2g} GiB"
            )
        return PairValues(values, error, tuple(notes))

    def _same_tokens(self) -> list[tuple[int, ...]]:
        """Sites whose samples are of the same tokens of the same stack."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for site, held in sorted(self._held.items()):
            key = (self._space.sites[site].id.stack, held.priority.numpy().tobytes())
            groups.setdefault(key, []).append(site)
        return [tuple(sites) for sites in groups.values()]

    def _kernels(self, site: int, matrix: Tensor, group: Tensor) -> Float[Tensor, "head token token"]:
        """Inner products of what each head writes at any two tokens of a group, without the diagonal."""
        outputs = self._held[site].outputs
        z = double(outputs[group.to(outputs.device)]).transpose(0, 1)  # [head token d_value]
        kernels = z @ matrix.to(z.device) @ z.transpose(1, 2)
        kernels.diagonal(dim1=1, dim2=2).zero_()
        return kernels

    def _inner(self, site: int) -> Float[Tensor, "head d_value d_value"] | None:
        """`W Wᵀ` of each head."""
        output = self._space.weights(self._space.sites[site]).output
        return None if output is None else double(output) @ double(output).transpose(1, 2)


def _priorities(part: Outputs) -> Float[Tensor, " token"]:
    """A number in [0, 1) for each token."""
    found = torch.empty(len(part.numbers), dtype=torch.float64)
    for number in part.numbers.unique().tolist():
        here = part.numbers == number
        places = part.positions[here]
        found[here] = uniforms(int(places.max()) + 1, seed=0, example=number, draw=0)[places]
    return found
