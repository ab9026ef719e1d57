"""Publishing a pruned model: its checkpoint is written beside its place, reloaded, described, and then put there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from headscope import card, verify
from headscope.card import CardFacts, SiteLine
from headscope.companions import copy_companions
from headscope.errors import UsageError
from headscope.folder_writing import new_folder
from headscope.layouts import SHARD_SIZE, save_masked, save_native, save_portable
from headscope.manifest import write_manifest
from headscope.merging import Merge
from headscope.models import LoadedModel
from headscope.portable import is_portable
from headscope.provenance import Provenance, versions
from headscope.pruned import Pruned
from headscope.repair import Repair
from headscope.spare_tensors import carry_spare
from headscope.stored import pad_token
from headscope.trials import Verdict
from headscope.verify import Inputs, Verification

_PIPELINES = {
    "causal-lm": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "masked-lm": "fill-mask",
    "question-answering": "question-answering",
    "text-classification": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
    "audio-classification": "audio-classification",
    "automatic-speech-recognition": "automatic-speech-recognition",
    "embedding": "feature-extraction",
}

_CHOICES = {"named": "name, by the user", "scores": "scores that the user gave", "random": "chance", "": "a plan"}
"""How a card says what is no criterion of its own."""


@dataclass(frozen=True)
class Publication:
    """How a checkpoint is written."""

    max_shard_size: str = SHARD_SIZE
    keep_extra: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})? ?[KMGT]B", self.max_shard_size, re.IGNORECASE):
            raise UsageError(f"--max-shard-size {self.max_shard_size}: expected a size such as 5GB or 200MB")


@dataclass(frozen=True)
class Basis:
    """What the choice of heads rests on, and what the judgement of the result; heads that were not `chosen` by a
    criterion now, but named or planned, do not rest on the first: only their repair does.
    """

    choosing: Provenance
    judging: Provenance
    chosen: bool = True


def publish(
    result: Pruned,
    stored: LoadedModel,
    config: PreTrainedConfig | None,
    inputs: Sequence[Inputs],
    output: Path,
    *,
    options: Publication,
    pad: int | None,
    basis: Basis,
) -> Pruned:
    """Write `stored`, whose heads are out, as the folder `output`; `config` describes it where it is native.

    `pad` is the pad token that its configuration had before a stand-in was put there for the data.

    Raises:
        ProofFailed: what a fresh process loads from the files is not what is in memory.
        OutputError: the folder cannot be written.
    """
    model, location = stored.model, stored.location
    stand_in = pad_token(model.config)
    with new_folder(output, source=location.origin, force=options.force, needed=result.after.weight_bytes) as folder:
        with _pad_token(model, config, pad):
            _save(model, config, folder, layout=result.layout, max_shard_size=options.max_shard_size)
        if location.gguf:
            stored.tokenizer().save_pretrained(folder)
        else:
            copy_companions(location.folder, folder, keep_extra=options.keep_extra, code=stored.trust_remote_code)
        if options.keep_extra and not location.gguf:
            carry_spare(location.folder, stored.unused, folder)
        code = stored.trust_remote_code or (config is None and is_portable(model.config))
        checks = verify.reloaded(
            folder, stored.task.auto_class, model, inputs, code=code, pad=stand_in if stand_in != pad else None
        )
        result = replace(result, verification=result.verification + Verification(tuple(checks)), folder=output)
        result.verification.require()
        (folder / card.NAME).write_text(card.card(_facts(result, stored, basis)), encoding="utf-8")
        write_manifest(folder, _manifest(result, stored, basis))
    return result


def _save(
    model: PreTrainedModel, config: PreTrainedConfig | None, folder: Path, *, layout: str, max_shard_size: str
) -> None:
    if config is not None:
        save_native(model, config, folder, max_shard_size=max_shard_size)
    elif layout == "portable" or is_portable(model.config):
        save_portable(model, folder, max_shard_size=max_shard_size)
    else:
        save_masked(model, folder, max_shard_size=max_shard_size)


@contextlib.contextmanager
def _pad_token(model: PreTrainedModel, config: PreTrainedConfig | None, pad: int | None) -> Iterator[None]:
    """The pad token of the source while the block runs, not one that only stood in for it."""
    parts = [one.get_text_config() for one in (model.config, config) if one is not None and pad_token(one) != pad]
    before = [part.pad_token_id for part in parts]
    try:
        for part in parts:
            part.pad_token_id = pad
        yield
    finally:
        for part, token in zip(parts, before, strict=True):
            part.pad_token_id = token


def site_lines(result: Pruned) -> list[SiteLine]:
    """Heads and key/value heads of each site before and after, and the numbers of those that went."""
    lines: list[SiteLine] = []
    for site in result.plan.sites:
        kept, groups = result.plan.kept(site.id), result.plan.kept_groups(site.id)
        after = (len(kept), len(groups) if result.merge is None else result.merge.left(site.id, len(groups)))
        if result.layout == "masked":
            after = (len(site.heads), site.n_kv_heads)
        removed = tuple(sorted(result.plan.removed_from(site.id)))
        lines.append(SiteLine(str(site.id), len(site.heads), after[0], site.n_kv_heads, after[1], removed))
    return lines


def _facts(result: Pruned, stored: LoadedModel, basis: Basis) -> CardFacts:
    location, before, after = stored.location, result.before, result.after
    whole, less = result.quality or (None, None)
    verdict = result.verdict
    return CardFacts(
        base_model=location.name,
        base_revision=location.revision,
        licence=None if location.gguf else card.source_licence(location.folder),
        pipeline_tag=_PIPELINES.get(stored.task_name),
        auto_class=stored.task.auto_class,
        layout=result.layout,
        heads=tuple(site_lines(result)),
        parameters_before=before.parameters,
        parameters_after=after.parameters,
        macs_before=before.macs_per_token,
        macs_after=after.macs_per_token,
        kv_before=before.kv_bytes_per_token,
        kv_after=after.kv_bytes_per_token,
        quality_before=whole,
        quality_after=less,
        quality_unrepaired=None if verdict is None or verdict.repair is None else verdict.pruned,
        repaired_sites=0 if verdict is None or verdict.repair is None else len(verdict.repair.sites),
        data=_public(basis.choosing.data) if basis.chosen and result.plan.criterion not in _CHOICES else "",
        criterion=_CHOICES.get(result.plan.criterion, result.plan.criterion),
        merged="" if result.merge is None else result.merge.how,
        proof={check.name: check.difference for check in result.verification.checks},
        generation=bool(stored.model.can_generate()),
    )


def _manifest(result: Pruned, stored: LoadedModel, basis: Basis) -> dict[str, Any]:
    location = stored.location
    return {
        "layout": result.layout,
        "auto_class": stored.task.auto_class,
        "task": stored.task_name,
        "source": {
            "model": location.name if location.revision else _public(location.name),
            "revision": location.revision,
            "weights_digest": location.digest(),
        },
        "data": {"choosing": _data(basis.choosing), "judging": _data(basis.judging)},
        "unused_tensors": list(stored.unused),
        "dtype": str(stored.model.dtype).removeprefix("torch."),
        "plan": result.plan.as_dict(),
        "merge": None if result.merge is None else _merge(result.merge),
        "history": [dict(entry) for entry in result.history],
        "cost": {"before": vars(result.before), "after": vars(result.after)},
        "quality": None if result.verdict is None else _quality(result.verdict),
        "repair": None if result.verdict is None or result.verdict.repair is None else _repair(result.verdict.repair),
        "proof": result.verification.as_dict(),
        "versions": versions(),
    }


def _quality(verdict: Verdict) -> dict[str, Any]:
    """Before, and after; where there was a repair also without it; and the rise of the loss with its 95 % interval."""
    found: dict[str, Any] = {"before": vars(verdict.whole), "after": vars(verdict.final)}
    if verdict.repaired is not None:
        found["unrepaired"] = vars(verdict.pruned)
    if verdict.increase is not None:
        found["loss_increase"] = vars(verdict.increase)
    return found


def _merge(merge: Merge) -> dict[str, Any]:
    """Which key/value heads became one, and how: not exact, so the proof compares with the tied model."""
    return {
        "kv_heads": merge.kv_heads,
        "exact": False,
        "keys": str(merge.keys),
        "values": str(merge.values),
        "sites": [{"site": str(one.site), "groups": [list(group) for group in one.groups]} for one in merge.sites],
    }


def _repair(repair: Repair) -> dict[str, Any]:
    """What was refitted, by which ridge, and what it did on held-out examples of the choosing data."""
    sites = [
        {
            "site": str(one.site),
            "ridge": one.ridge,
            "bias": one.bias is not None,
            "error_before": one.error_before,
            "error_after": one.error_after,
        }
        for one in repair.sites
    ]
    return {
        "divergence_before": repair.divergence_before,
        "divergence_after": repair.divergence_after,
        "sites": sites,
    }


def _public(name: str) -> str:
    """What a name may show in files that are made to be shared: of a local path only its end."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def _data(rests_on: Provenance) -> Mapping[str, Any] | None:
    """The examples of one study, and how it ran; None without."""
    if not rests_on.data:
        return None
    found = {"name": _public(rests_on.data), "digest": rests_on.data_digest, "examples": rests_on.examples}
    return found | {name: getattr(rests_on, name) for name in ("seed", "dtype", "device", "attention")}
