"""Task metrics: one number for how often, or how well, a model is right, and the same for resampled examples.

The number in a report is scikit-learn's where it has the metric. Every metric is also a function of sums over examples,
so that thousands of resamples cost one matrix product; both ways give the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from headscope.errors import UsageError, nearest

if TYPE_CHECKING:
    from headscope.examples import Batch
    from headscope.tasks import Task

Array = NDArray[Any]
IMBALANCED = 0.8
"""Share of the most frequent class above which accuracy gives way to F1."""


@dataclass(frozen=True)
class Predictions:
    """What a model said at every predicted position and what was right, in the order of the examples.

    `example` is the place of a row's example, from 0 to `count` - 1; `loss` is in nats (squared units for a number).
    `prediction` and `target` are class numbers, or numbers. All are `[row]`.
    """

    example: Array
    prediction: Array
    target: Array
    loss: Array
    count: int

    @property
    def right(self) -> Array:
        """Whether each position is predicted right, `[row]`."""
        return self.prediction == self.target

    def sums(self, *values: Array) -> Array:
        """Sums of `[row]` values over the positions of each example, `[example value]`."""
        found = [numpy.bincount(self.example, weights=value, minlength=self.count) for value in values]
        return numpy.stack(found, axis=1)

    def flags(self) -> tuple[Array, Array]:
        """Targets and predictions of yes/no labels, each `[example label]`."""
        return self.target.reshape(self.count, -1), self.prediction.reshape(self.count, -1)


@dataclass(frozen=True)
class Metric:
    """One metric: `of` makes it from `totals`, which are summed over examples.

    `totals` is `[example total]`; `of` takes `[resample total]` and gives `[resample]`, NaN where it is not defined.
    `library` is scikit-learn's own way to the same number. `apart`: an example's totals do not depend on the others.
    """

    name: str
    meaning: str
    totals: Callable[[Predictions], Any]
    of: Callable[[Array], Array]
    higher: bool = True
    library: Callable[[Predictions], float] | None = None
    apart: bool = True

    @property
    def of_loss(self) -> bool:
        """Whether it is made of losses alone, so that no prediction need be kept."""
        return self.totals is _lost

    def value(self, predictions: Predictions) -> float | None:
        """The metric; None where it is not defined (a correlation with a constant)."""
        found = float(self.resampled(predictions, numpy.ones((1, predictions.count)))[0])
        if not numpy.isfinite(found):
            return None
        return found if self.library is None else float(self.library(predictions))

    def resampled(self, predictions: Predictions, weights: Array) -> Array:
        """The metric of samples in which each example occurs `weights[resample example]` times, `[resample]`."""
        with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.of(numpy.asarray(weights @ self.totals(predictions)))

    def kept(self, value: float, base: float, share: float) -> bool:
        """Whether `value` keeps this share of `base`: at least share·base, or where low is good, at most base/share."""
        return value >= share * base if self.higher else value <= base / share


def _right(predictions: Predictions) -> Array:
    return predictions.sums(predictions.right, numpy.ones(len(predictions.example)))


def _all_right(predictions: Predictions) -> Array:
    right, positions = _right(predictions).T
    return numpy.stack([right == positions, numpy.ones(predictions.count)], axis=1).astype(float)


def _lost(predictions: Predictions) -> Array:
    return predictions.sums(predictions.loss, numpy.ones(len(predictions.example)))


def _ratio(totals: Array) -> Array:
    return totals[:, 0] / totals[:, 1]


def _accuracy(predictions: Predictions) -> float:
    from sklearn.metrics import accuracy_score

    return accuracy_score(predictions.target, predictions.prediction)


def _mean_squared_error(predictions: Predictions) -> float:
    from sklearn.metrics import mean_squared_error

    return mean_squared_error(predictions.target, predictions.prediction)


def _class_counts(predictions: Predictions) -> Any:
    classes = int(max(predictions.prediction.max(), predictions.target.max())) + 1
    return _counts(predictions, predictions.prediction, predictions.target, classes)


def _label_counts(predictions: Predictions) -> Any:
    """A label's yes is a class; its no is none."""
    labels = len(predictions.example) // predictions.count
    label = numpy.tile(numpy.arange(labels), predictions.count)
    said, held = (numpy.where(flags == 1, label, -1) for flags in (predictions.prediction, predictions.target))
    return _counts(predictions, said, held, labels)


def _counts(predictions: Predictions, said: Array, held: Array, classes: int) -> Any:
    """Hits of each class, then half of how often it is said or holds: sparse `[example 2·class]`; -1 is none."""
    from scipy import sparse

    example, hit = predictions.example, (said == held) & (said >= 0)
    which = [said[hit], classes + said[said >= 0], classes + held[held >= 0]]
    where = [example[hit], example[said >= 0], example[held >= 0]]
    amount = [numpy.full(len(one), share) for one, share in zip(which, (1.0, 0.5, 0.5), strict=True)]
    places = numpy.concatenate(where), numpy.concatenate(which)
    return sparse.csc_array((numpy.concatenate(amount), places), shape=(predictions.count, 2 * classes))


def _mean_f1(totals: Array) -> Array:
    """The mean over the classes that occur or are predicted of 2·hits / (predicted + occurring)."""
    hits, halves = numpy.split(totals, 2, axis=1)
    occurring = halves > 0
    return numpy.where(occurring, hits / halves, 0).sum(axis=1) / occurring.sum(axis=1)


def _class_f1(predictions: Predictions) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(predictions.target, predictions.prediction, average="macro"))


def _label_f1(predictions: Predictions) -> float:
    from sklearn.metrics import f1_score

    left_out: Any = numpy.nan  # labels that neither hold nor are said
    return float(f1_score(*predictions.flags(), average="macro", zero_division=left_out))


def _r2(predictions: Predictions) -> float:
    from sklearn.metrics import r2_score

    return r2_score(predictions.target, predictions.prediction)


def _moments(predictions: Predictions) -> Array:
    """Count, sums, squares and products of targets and predictions, counted from their medians; squared errors."""
    x, y = (values - numpy.median(values) for values in (predictions.target, predictions.prediction))
    gap = predictions.prediction - predictions.target
    return predictions.sums(numpy.ones(len(x)), x, y, x * x, y * y, x * y, gap * gap)


def _spread(n: Array, x: Array, xx: Array) -> Array:
    """Sum of squares about the mean; NaN for a constant, whose rounding errors are no spread."""
    spread = xx - x * x / n
    return numpy.where(spread > 1e-12 * xx, spread, numpy.nan)


def _pearson(totals: Array) -> Array:
    n, x, y, xx, yy, xy, _ = totals.T
    return (xy - x * y / n) / numpy.sqrt(_spread(n, x, xx) * _spread(n, y, yy))


def _explained(totals: Array) -> Array:
    n, x, _, xx, _, _, gaps = totals.T
    return 1 - gaps / _spread(n, x, xx)


ACCURACY = Metric("accuracy", "share of examples predicted right", _right, _ratio, library=_accuracy)
LABEL_ACCURACY = Metric("accuracy", "share of all yes/no labels predicted right", _right, _ratio, library=_accuracy)
TOKEN_ACCURACY = Metric(
    "token-accuracy", "share of predicted tokens that are right, over all examples", _right, _ratio, library=_accuracy
)
EXACT_MATCH = Metric("exact-match", "share of examples whose every position is predicted right", _all_right, _ratio)
F1 = Metric("f1", "mean of the classes' F1 (macro)", _class_counts, _mean_f1, library=_class_f1, apart=False)
LABEL_F1 = Metric("f1", "mean of the labels' F1 (macro)", _label_counts, _mean_f1, library=_label_f1, apart=False)
PERPLEXITY = Metric(
    "perplexity",
    "exp of the mean negative log-likelihood of all predicted tokens (long examples weigh more, unlike in `loss`)",
    _lost,
    lambda totals: numpy.exp(_ratio(totals)),
    higher=False,
)
PEARSON = Metric("pearson", "correlation of predicted and right numbers", _moments, _pearson, apart=False)
R2 = Metric(
    "r2", "share of the variance of the right numbers that is explained", _moments, _explained, library=_r2, apart=False
)
MSE = Metric("mse", "mean squared error", _lost, _ratio, higher=False, library=_mean_squared_error)
METRICS = {metric.name: metric for metric in (ACCURACY, F1, TOKEN_ACCURACY, EXACT_MATCH, PERPLEXITY, PEARSON, R2, MSE)}
"""Every metric by its name on the command line."""


def require_known(name: str) -> None:
    """Refuse a metric that is none, whatever the data.

    Raises:
        UsageError: there is no such metric.
    """
    if name not in METRICS:
        raise UsageError(f"no metric {name!r}", hint=nearest(name, METRICS))


def choose_metric(name: str | None, task: Task, task_name: str, batches: Sequence[Batch]) -> Metric | None:
    """The metric `name`, or the task's own; None where nothing is right or wrong (no labels, or an embedding).

    A task's own: accuracy of classes, or F1 where one class has more than 80 % of the targets, or where an example has
    several labels; perplexity of language models; token accuracy where a target text is given; exact match of spans;
    correlation of numbers.

    Raises:
        UsageError: there is no such metric, or it does not fit the task or its data.
    """
    if name is not None:
        require_known(name)
    labelled = all(batch.labelled for batch in batches)
    fitting = {metric.name: metric for metric in _fitting(task, batches)} if labelled else {}
    if name is None:
        return next(iter(fitting.values()), None)
    if task.distribution == "direction":
        raise UsageError(f"{task_name} has no metric, only a divergence", hint="leave out --metric")
    if not labelled:
        raise UsageError(f"metric {name} needs labels, and the data has none for this model")
    if name not in fitting:
        raise UsageError(f"metric {name} does not fit {task_name}", hint=f"it has: {', '.join(fitting)}")
    return fitting[name]


def _fitting(task: Task, batches: Sequence[Batch]) -> tuple[Metric, ...]:
    """The metrics that fit a task and its data, the default first; a task's nature shows in the roles of its data."""
    if task.distribution == "direction":
        return ()
    if task.distribution == "gaussian":
        return PEARSON, R2, MSE
    if "target" in task.required:
        return TOKEN_ACCURACY, EXACT_MATCH, PERPLEXITY
    if task.vocabulary:
        return PERPLEXITY, TOKEN_ACCURACY
    if "answer" in task.optional:
        return EXACT_MATCH, TOKEN_ACCURACY
    if "tokens" in task.optional:
        return (F1, TOKEN_ACCURACY) if imbalanced(batches) else (TOKEN_ACCURACY, F1)
    if batches[0].targets.shape[1] > 1:
        return LABEL_F1, LABEL_ACCURACY, EXACT_MATCH
    return (F1, ACCURACY) if imbalanced(batches) else (ACCURACY, F1)


def imbalanced(batches: Sequence[Batch]) -> bool:
    """Whether one class has more than 80 % of the targets."""
    targets = numpy.concatenate([batch.targets[batch.predicted].numpy() for batch in batches])
    return bool(numpy.bincount(targets.astype(numpy.int64)).max() > IMBALANCED * len(targets))
