"""`subquad sweep`: search over values of config fields, one run per trial.

A journal file in the folder holds the study, so that several processes can share the trials and an interrupted sweep
can be resumed. The process that runs a trial holds its lock. A trial that has started but is not locked has lost its
process; the next process resumes its run.
"""

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_type_hints

from subquad_lab import Diverged, UsageError
from subquad_lab.figures.plots import compared
from subquad_lab.options.fields import typed, with_values
from subquad_lab.system.files import locked, remove_leftovers, write_whole
from subquad_lab.system.journal import Journal
from subquad_lab.system.text import say
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Experiment
from subquad_lab.training.lifecycle import settled
from subquad_lab.training.processes import refuse_several
from subquad_lab.training.run import Run
from subquad_lab.training.seeds import finished, train

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages.journal import BaseJournalBackend
    from optuna.trial import Trial, TrialState

JOURNAL = "journal.log"
Values = dict[str, list[Any]]  # by field


@dataclass(frozen=True)
class Search:
    """The fields and values to search, and the output folder."""

    experiment: Experiment[Any]
    config: Training
    out: Path
    grid: Values
    span: Values

    def config_with(self, values: dict[str, Any], source: object) -> Training:
        """Return the config of a trial."""
        made: Training = with_values(self.experiment, self.config, values, source)
        return made


def run(experiment: Experiment[Any], config: Training, out: Path, trials: int, grid: Values, span: Values) -> None:
    """Run the remaining trials, then print all of them, best first."""
    refuse_several("sweep")
    config = settled(config)
    search = Search(experiment, config, out, grid, span)
    planned = check(search, trials)
    study = make_study(out, experiment.higher_is_better)
    with locked(out, wait=True):  # Otherwise two processes that start together would both enqueue the grid.
        remove_leftovers(out)
        keep_to(study, out, {"experiment": experiment.name, "config": asdict(config), "grid": grid, "span": span})
        for values in planned:
            study.enqueue_trial(values, skip_if_exists=True)
    while (claimed := claim(study, search, None if planned else trials)) is not None:
        number, values, held = claimed
        with held:
            finish(study, search, number, values)
    show(study, search)


def check(search: Search, trials: int) -> list[dict[str, Any]]:
    """Validate fields and values before anything runs.

    Returns:
        All combinations of the grid, or an empty list if there is a span to search.
    """
    grid, span = search.grid, search.span
    if not grid and not span:
        raise UsageError("--grid: expected --grid.FIELD A,B,C or --span.FIELD LOW,HIGH, got neither")
    if trials < 1:
        raise UsageError(f"--trials: expected a positive integer, got {trials}")
    if both := grid.keys() & span.keys():
        raise UsageError(f"--span.{min(both)}: expected either --grid or --span for a field, got both")
    for field, options in grid.items():
        for value in options:
            typed(search.experiment, {field: value}, f"--grid.{field}")
    for field, ends in span.items():
        if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends) or not ends[0] < ends[1]:
            raise UsageError(f"--span.{field}: expected two numbers, the lower first, got {ends}")
        for end in ends:
            search.config_with({field: end}, f"--span.{field}")
    every = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for values in every:
        search.config_with(values, f"--grid: {values}")  # Values must also be valid in combination.
    return [] if span else every


def keep_to(study: "Study", out: Path, plan: dict[str, Any]) -> None:
    """Record the plan of the sweep, or raise if the folder holds a different sweep."""
    known = study.user_attrs.get("plan")
    if known is None:
        study.set_user_attr("plan", plan)
    elif known != json.loads(json.dumps(plan)):
        raise UsageError(f"--out: {out} holds a sweep with another config, grid or span; use a new folder")


def make_study(out: Path, higher_is_better: bool) -> "Study":
    import optuna
    from optuna.storages import JournalStorage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot create {out}: {error.strerror}") from error
    storage = JournalStorage(cast("BaseJournalBackend", Journal(out / JOURNAL)))
    direction: Literal["maximize", "minimize"] = "maximize" if higher_is_better else "minimize"
    return optuna.create_study(study_name="sweep", storage=storage, direction=direction, load_if_exists=True)


def claim(study: "Study", search: Search, most: int | None) -> tuple[int, dict[str, Any], ExitStack] | None:
    """Return an unclaimed trial, its values and its lock, or None if no trial is left."""
    from optuna.samplers import TPESampler
    from optuna.trial import Trial, TrialState

    out, kinds = search.out, get_type_hints(search.experiment.config)
    whole = {field for field, kind in kinds.items() if float not in flat(kind)}
    with locked(out, wait=True):  # One process at a time looks for work.
        # One seed per trial: a single seed would draw the same values again in each process and after each restart.
        study.sampler = TPESampler(seed=search.config.seed + len(study.trials))
        for frozen in study.get_trials(states=(TrialState.RUNNING,)):
            try:
                held = hold(out, frozen.number)
            except UsageError:  # Its process is alive.
                continue
            if study.trials[frozen.number].state != TrialState.RUNNING:  # It ended after the list was made.
                held.close()
                continue
            # If the process was killed before all values were drawn, the rest are drawn now.
            return frozen.number, drawn(Trial(study, frozen._trial_id), search, whole), held
        if count(study, TrialState.WAITING) == 0 and (most is None or len(study.trials) >= most):
            return None
        trial = study.ask()
        return trial.number, drawn(trial, search, whole), hold(out, trial.number)


def drawn(trial: "Trial", search: Search, whole: set[str]) -> dict[str, Any]:
    """Draw the values of a trial, keeping those drawn before."""
    values: dict[str, Any] = {
        field: trial.suggest_categorical(field, options) for field, options in search.grid.items()
    }
    for field, (low, high) in search.span.items():
        suggest = trial.suggest_int if field in whole else trial.suggest_float
        values[field] = suggest(field, low, high, log=low > 0)
    return values


def flat(kind: Any) -> tuple[Any, ...]:
    """Return the types that a field may have."""
    return get_args(kind) or (kind,)


def hold(out: Path, number: int) -> ExitStack:
    """Take the lock of a trial; closing the result releases it."""
    folder = out / "locks" / folder_of(number)
    folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    stack.enter_context(locked(folder))
    return stack


def folder_of(number: int) -> str:
    return f"trial-{number:03d}"


def finish(study: "Study", search: Search, number: int, values: dict[str, Any]) -> None:
    """Train and report the result to the study; a run that diverges is a failed trial."""
    from optuna.trial import TrialState

    folder = folder_of(number)
    try:
        say(f"{folder}: {', '.join(f'{field} {value}' for field, value in values.items())}", to_error=True)
        made = train(search.experiment, search.config_with(values, "sweep"), search.out / folder)
    except (Diverged, UsageError) as error:  # Caused by these values. Other errors, such as a full disk, end the sweep.
        say(f"{folder}: {error}")
        study.tell(number, state=TrialState.FAIL)
        return
    study.tell(number, made.mean("valid", search.experiment.measure))


def count(study: "Study", state: "TrialState") -> int:
    return len(study.get_trials(states=(state,)))


def show(study: "Study", search: Search) -> None:
    """Print the trials, best first, and plot their learning curves."""
    from optuna.trial import TrialState

    experiment, out = search.experiment, search.out
    measure = experiment.measure
    done = study.get_trials(states=(TrialState.COMPLETE,))
    lines: dict[str, list[Run]] = {}
    for trial in sorted(done, key=lambda trial: cast(float, trial.value), reverse=experiment.higher_is_better):
        folder = folder_of(trial.number)
        values = ", ".join(f"{field} {value}" for field, value in trial.params.items())
        made = finished(experiment, search.config_with(trial.params, folder), out / folder)
        valid, test = (made.shown(part, measure) for part in ("valid", "test"))
        say(f"{folder}  validation {measure} {valid}  test {test}  {values}")
        lines[f"{values} ({folder})"] = made.runs
    if lines:
        with locked(out, wait=True):
            write_whole(out / "sweep.svg", compared(lines, experiment))
        say(out / "sweep.svg")
    failed, running = count(study, TrialState.FAIL), count(study, TrialState.RUNNING)
    if failed or running:
        say(f"{failed} trials failed, {running} are running in other processes")
