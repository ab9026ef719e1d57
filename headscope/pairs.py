"""All heads of a model in one row, site after site, and tables of their pairs, `[head head]` in that order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscope.heads import HeadId, Site
from headscope.matrices import HeadWeights
from headscope.shapes import Bool, Float, Int
from headscope.states import State


@dataclass(frozen=True)
class HeadSpace:
    """The heads of some sites in site order; a head's place is its row and column in every table of pairs.

    `weights` cuts out the matrices of a site's heads when they are asked for.
    """

    sites: tuple[Site, ...]
    weights: Callable[[Site], HeadWeights]

    @cached_property
    def heads(self) -> tuple[HeadId, ...]:
        """The heads by place."""
        return tuple(head for site in self.sites for head in site.heads)

    @cached_property
    def owner(self) -> Int[Tensor, " head"]:
        """Which site each head belongs to, by the site's number."""
        counts = torch.tensor([site.n_heads for site in self.sites])
        return torch.arange(len(self.sites)).repeat_interleave(counts)

    def places(self, site: int) -> Int[Tensor, " head_of_site"]:
        """The places of a site's heads."""
        first = sum(one.n_heads for one in self.sites[:site])
        return torch.arange(first, first + self.sites[site].n_heads)

    def places_of(self, sites: tuple[int, ...]) -> Int[Tensor, " head_of_sites"]:
        """The places of the heads of several sites, in the order of `sites`."""
        return torch.cat([self.places(site) for site in sites])

    def spread(self, table: Tensor) -> Tensor:
        """A table of sites, `[site site]`, as one of heads, `[head head]`."""
        return table[self.owner][:, self.owner]

    def blank(self) -> Float[Tensor, "head head"]:
        """A table of zeros in float64."""
        return torch.zeros(len(self.heads), len(self.heads), dtype=torch.float64)

    @cached_property
    def shared_kv(self) -> Bool[Tensor, "head head"]:
        """Pairs of two heads that read one and the same key/value head, so that these are alike by construction."""
        group: list[int] = []
        for site in self.sites:
            first = group[-1] + 1 if group else 0
            group += [first + site.kv_head(head) for head in range(site.n_heads)]
        owner = torch.tensor(group)
        same = owner[:, None] == owner
        return same.fill_diagonal_(False)


@dataclass(frozen=True)
class Pairs:
    """Some pairs of heads by place: `left[i]` with `right[i]`."""

    left: Int[Tensor, " pair"]
    right: Int[Tensor, " pair"]

    def __len__(self) -> int:
        return len(self.left)


class PairMeans:
    """Means for pairs of heads of sums that come in parts: of what is added, over the weight that is added with it."""

    def __init__(self, space: HeadSpace) -> None:
        self._sums = space.blank()
        self._weights = torch.zeros(len(space.heads), dtype=torch.float64)

    def add(self, heads: Tensor, table: Tensor, weight: float) -> None:
        """Add a table of the pairs of `heads`, and the weight that it stands for.

        Sums go where tables are made, so that the host need not wait for them.
        """
        places, more = heads.numpy(), double(table)
        first, count = int(places[0]), len(places)
        self._sums = self._sums.to(more.device)
        if int(places[-1]) - first == count - 1:  # places rise: a block, which is added many times faster
            self._sums[first : first + count, first : first + count] += more
        else:
            self._sums[heads[:, None], heads] += more
        self._weights[heads] += weight

    def state(self) -> State:
        """What was added so far."""
        return {"sums": self._sums.cpu(), "weights": self._weights}

    def absorb(self, state: State) -> None:
        """Add what others have added."""
        self._sums += state["sums"].to(self._sums.device)
        self._weights += state["weights"]

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return self._sums.nbytes

    def means(self) -> Float[Tensor, "head head"]:
        """The mean of every pair; NaN where nothing was added. Two heads that were added apart mean nothing."""
        return self._sums.cpu() / torch.minimum(self._weights[:, None], self._weights)


def normalised(table: Float[Tensor, "head head"]) -> Float[Tensor, "head head"]:
    """⟨a, b⟩ / (‖a‖ ‖b‖) from a table of inner products; NaN where a norm is zero."""
    norms = table.diagonal().clamp_min(0).sqrt()
    return table / norms[:, None] / norms


def double(tensor: Tensor) -> Tensor:
    """The tensor in float64, off devices that have none."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


class Averaged:
    """What keeps nothing of the parts but the means of pairs: its state is theirs."""

    _means: PairMeans

    def state(self) -> State:
        """The sums so far."""
        return self._means.state()

    def absorb(self, state: State) -> None:
        """Add the sums of other parts."""
        self._means.absorb(state)

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return self._means.size
