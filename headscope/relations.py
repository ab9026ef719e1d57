"""Syntactic roles: per dependency relation the head that finds it best, its accuracy, and that of a fixed offset.

Voita et al. 2019 ("Analyzing Multi-Head Self-Attention", section 5.2) judge a head by how often a word attends most to
the word at the other end of a relation, in each direction, against the best fixed distance. Clark et al. 2019 ("What
Does BERT Look At?", section 4.2) take tokens to words: attention to a word is summed over its tokens, attention from a
word is the mean over its tokens. Special tokens are left out, and a word's prediction is the other word that it attends
to most (the first of equals). Accuracy is the share of a relation's instances where the prediction is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy
import torch
from torch import Tensor

from headscope.columns import Column
from headscope.conllu import Treebank
from headscope.errors import DataError, ModelError, UsageError
from headscope.heads import AttentionKind, HeadId, Site, SiteId
from headscope.memory import memory_errors
from headscope.reading import RowReader
from headscope.scores import RowBlock
from headscope.study import Progress, Study
from headscope.tables import Cell, Table
from headscope.texts import Texts
from headscope.unpack import printable
from headscope.words import Aligned, Aligner

FEWEST = 5
"""Instances below which a relation is not judged."""
FARTHEST = 10
"""The largest fixed offset, in words."""
DIRECTIONS = ("dependent->head", "head->dependent")
_VOITA = "Voita et al. 2019, Analyzing Multi-Head Self-Attention, section 5.2"
_CLARK = "Clark et al. 2019, What Does BERT Look At?, section 4.2"

RELATION_COLUMNS = (
    Column("relation", "name", "dependency relation without its subtype; root is left out", untrusted=True),
    Column("direction", "name", "which end of the relation attends to the other: dependent->head or head->dependent"),
    Column("instances", "count", "pairs of words judged; for causal heads those whose target comes before", _VOITA),
    Column("head", "label", "the head with the highest accuracy, the first of equals", untrusted=True),
    Column("accuracy", "1", "share of instances where the head's word attends most to the other end", _CLARK),
    Column(
        "baseline", "1", "accuracy of the best fixed offset in words, from -10 to 10, on the same instances", _VOITA
    ),
    Column("offset", "words", "that offset; empty where none is ever right", _VOITA),
    Column("gain", "1", "accuracy minus baseline"),
)


def relation_table(study: Study, treebank: Treebank, *, progress: Progress | None = None) -> Table:
    """One row per relation and direction, from one pass over the sentences, of which one at a time is held.

    Raises:
        UsageError: the model reads no text.
        ModelError: its tokenizer cannot align tokens and words, or no head attends from text to text.
        DataError: no sentence fits the model, or attention is not finite.
    """
    relations = sorted({word.relation for one in treebank.sentences for word in one.words if word.attached})
    if not relations:
        raise DataError(f"{printable(treebank.name)}: no word depends on another by a named relation")
    tally = _Tally(relations, _sites(study))
    used = _pass(study, treebank, tally, progress)
    notes = (*study.loaded.notes, *_notes(used, len(treebank.sentences)), *tally.notes())
    notes += tuple(f"not analysed: {problem}" for problem in study.discovery.problems)
    origin = replace(study.provenance(), data=treebank.name, data_digest=treebank.digest)
    origin = replace(origin, examples=used.read, skipped=used.long)
    return Table("relations", RELATION_COLUMNS, tuple(tally.rows()), "", origin, notes)


@dataclass
class _Used:
    """Sentences read or too long for `longest` tokens; words read or of unknown tokens; instances lost."""

    longest: int | None
    read: int = 0
    long: int = 0
    words: int = 0
    unread: int = 0
    lost: int = 0


def _pass(study: Study, treebank: Treebank, tally: _Tally, progress: Progress | None) -> _Used:
    """Let the model read the sentences, the first after a seeded shuffle, and tally what its heads attend to."""
    options, count = study.options.data, len(treebank.sentences)
    aligner, used = Aligner(study.loaded, parse_special=options.parse_special), _Used(study.loaded.max_length())
    order = numpy.random.Generator(numpy.random.Philox(options.seed)).permutation(count)
    total = count if options.limit is None else min(options.limit, count)
    reader = RowReader(study.loaded.model, tally.sites, [tally.read], replace=True)
    with torch.no_grad(), reader.reading(), memory_errors(1):
        for index in order.tolist():
            if used.read == total:
                break
            aligned = aligner.align(treebank.sentences[index])
            if used.longest is not None and len(aligned.word) > used.longest:
                used.long += 1
                continue
            used.lost += tally.start(aligned)
            reader.start(Texts(aligned.inputs, None, None), 1)
            aligner.run(aligned)
            used.read += 1
            used.words += len(treebank.sentences[index].words)
            used.unread += aligned.unread(aligner.tokenizer.unk_token_id)
            if progress is not None:
                progress(used.read, total)
    if not used.read:
        name = printable(treebank.name)
        raise DataError(f"every sentence of {name} is longer than the model's limit of {used.longest} tokens")
    return used


def _notes(used: _Used, count: int) -> Iterator[str]:
    if used.read + used.long < count:
        yield f"{used.read} of {count} sentences are used; --limit all uses all"
    if used.long:
        yield f"{used.long} sentences longer than the model's limit of {used.longest} tokens were skipped"
    if used.unread:
        yield f"{used.unread} of {used.words} words are unknown to the tokenizer"
    if used.lost:
        yield f"{used.lost} instances with a word that has no token were left out"


def _sites(study: Study) -> list[Site]:
    """The sites whose heads attend from words to words of one text; of a pair of stacks those of the encoder."""
    model = study.loaded.model
    config = model.config
    if model.main_input_name != "input_ids" or (hasattr(config, "vision_config") and hasattr(config, "text_config")):
        raise UsageError(f"{study.loaded.location.name} does not read text alone, and --annotations is for text")
    stacks = ("encoder",) if config.is_encoder_decoder else ("encoder", "decoder")
    sites = [site for site in study.sites if site.id.kind is not AttentionKind.CROSS and site.id.stack in stacks]
    if not sites:
        raise ModelError(f"{study.loaded.location.name} has no self-attention over text")
    return sites


@dataclass
class _Running:
    """What the running sentence asks: its pairs of words, and the attention between words `[head word word]` of sites
    that are not yet read to their last query.

    `token_word` is `[token word]`, 1 where the token belongs to the word; `row` numbers relations and directions.
    """

    line: int
    token_word: Tensor
    pieces: Tensor
    query: Tensor
    target: Tensor
    row: Tensor
    maps: dict[SiteId, Tensor] = field(default_factory=dict)


class _Tally:
    """How often each head is right: counts for each relation and direction, added one sentence at a time."""

    def __init__(self, relations: Sequence[str], sites: Sequence[Site]) -> None:
        self.relations, self.sites = list(relations), list(sites)
        self.number = {relation: 2 * index for index, relation in enumerate(relations)}
        rows, kinds = 2 * len(relations), {site.id.kind for site in sites}
        self.right = {site.id: torch.zeros(rows, site.n_heads, dtype=torch.long) for site in sites}
        self.seen = torch.zeros(rows, dtype=torch.long)
        self.asked = {kind: torch.zeros(rows, dtype=torch.long) for kind in kinds}
        self.offsets = {kind: torch.zeros(rows, 2 * FARTHEST + 1, dtype=torch.long) for kind in kinds}
        self.odd: set[SiteId] = set()
        self._running: _Running | None = None

    def start(self, aligned: Aligned) -> int:
        """Begin a sentence; returns how many of its instances are lost, as one of their words has no token."""
        words = aligned.sentence.words
        token_word = torch.zeros(len(aligned.word), len(words), dtype=torch.float64)
        for token, word in enumerate(aligned.word):
            if word is not None:
                token_word[token, word] = 1
        pieces = token_word.sum(dim=0)
        pairs = [
            pair
            for dependent, word in enumerate(words)
            if word.attached
            for pair in (
                (dependent, word.head - 1, self.number[word.relation]),
                (word.head - 1, dependent, self.number[word.relation] + 1),
            )
        ]
        query, target, row = torch.tensor(pairs, dtype=torch.long).reshape(-1, 3).unbind(dim=1)
        kept = (pieces[query] > 0) & (pieces[target] > 0)
        self._running = _Running(aligned.sentence.line, token_word, pieces, query[kept], target[kept], row[kept])
        self._count(self._running)
        return int((~kept).sum())

    def _count(self, now: _Running) -> None:
        """Add what does not depend on heads: instances, and which fixed offsets are right."""
        self.seen += torch.bincount(now.row, minlength=len(self.seen))
        for kind, asked in self.asked.items():
            kept = _judged(now, kind)
            row, offset = now.row[kept], (now.target - now.query)[kept]
            asked += torch.bincount(row, minlength=len(asked))
            near = offset.abs() <= FARTHEST
            place = (row[near], offset[near] + FARTHEST)
            self.offsets[kind].index_put_(place, torch.ones_like(place[0]), accumulate=True)

    def read(self, block: RowBlock) -> dict[str, Tensor]:
        """Take a block of attention rows to words, and judge the site's heads at its last query; sums nothing else."""
        now, site = self._running, block.site.id
        assert now is not None
        tokens, (sequences, _, count, keys) = len(now.token_word), block.rows.shape
        first = int(block.positions[0])
        if sequences != 1 or first + count > tokens or keys > tokens:
            self.odd.add(site)
            return {}
        precise = torch.float32 if block.rows.device.type == "mps" else torch.float64
        token_word = now.token_word.to(block.rows.device, precise)
        to_words = block.rows[0].to(precise) @ token_word[:keys]  # [head query word]
        found = torch.einsum("qw,hqv->hwv", token_word[first : first + count], to_words)
        # q query token, h head, w query word, v key word
        now.maps[site] = now.maps[site] + found if site in now.maps else found
        if first + count == tokens:
            self._judge(block.site, now.maps.pop(site), now)
        return {}

    def _judge(self, site: Site, sums: Tensor, now: _Running) -> None:
        """Count the instances that each head gets right, from its attention between words summed over query tokens."""
        pieces = now.pieces.to(sums)
        if not bool(sums.isfinite().all()):
            raise DataError(
                f"attention of the sentence at line {now.line} is not finite at {site.id}",
                hint="use --dtype float32 or bfloat16",
            )
        mean = sums / pieces.clamp_min(1)[:, None]
        none = torch.eye(len(pieces), dtype=torch.bool, device=sums.device) | (pieces == 0)
        prediction = mean.masked_fill(none, -1).argmax(dim=-1).cpu()  # [head word]
        kept = _judged(now, site.id.kind)
        right = prediction[:, now.query[kept]] == now.target[kept]
        self.right[site.id].index_add_(0, now.row[kept], right.T.long())

    def rows(self) -> Iterator[dict[str, Cell]]:
        """The report: relations by name, of each first the dependent's direction."""
        for row in range(len(self.seen)):
            if not self.seen[row]:
                continue
            relation, direction = self.relations[row // 2], DIRECTIONS[row % 2]
            yield {"relation": relation, "direction": direction, **self._best(row)}

    def _best(self, row: int) -> dict[str, Cell]:
        """The best head of a row and the best offset on the instances that this head was judged on."""
        cells: dict[str, Cell] = dict.fromkeys(("head", "accuracy", "baseline", "offset", "gain"))
        most = max(int(asked[row]) for asked in self.asked.values())
        best: tuple[float, HeadId] | None = None
        for site in self.sites:
            count = int(self.asked[site.id.kind][row])
            if count < FEWEST or site.id in self.odd:
                continue
            right, head = self.right[site.id][row].max(dim=0)
            if best is None or int(right) / count > best[0]:
                best = (int(right) / count, site.heads[int(head)])
        if best is None:
            return {"instances": most, **cells}
        accuracy, kind = best[0], best[1].site.kind
        count = int(self.asked[kind][row])
        right, offset = _best_offset(self.offsets[kind][row].tolist())
        baseline = right / count
        cells = {"head": str(best[1]), "accuracy": accuracy, "baseline": baseline, "offset": offset}
        return {"instances": count, **cells, "gain": accuracy - baseline}

    def notes(self) -> Iterator[str]:
        """What a reader of the report should know."""
        if AttentionKind.CAUSAL in self.asked:
            yield "causal heads see no later word: they are judged only where the target comes before"
        for site in sorted(self.odd):
            yield f"not analysed: {site} attends in pieces that are not the sentence's tokens"


def _judged(now: _Running, kind: AttentionKind) -> Tensor:
    """Which instances a head of this kind can be judged on: a causal head sees no later word."""
    return now.target < now.query if kind is AttentionKind.CAUSAL else torch.ones_like(now.query, dtype=torch.bool)


def _best_offset(right: Sequence[int]) -> tuple[int, int | None]:
    """How often the best fixed offset is right, and which that is: of equals the nearest, then the one before."""
    by_distance: Callable[[int], tuple[int, int]] = lambda offset: (abs(offset), offset)  # noqa: E731
    offsets = sorted((offset for offset in range(-FARTHEST, FARTHEST + 1) if offset), key=by_distance)
    best = max(offsets, key=lambda offset: right[offset + FARTHEST])
    count = right[best + FARTHEST]
    return count, best if count else None
