"""The state of a pruner: refused, if it does not fit, before anything is touched."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

VERSION = 1


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise ValueError if `state` cannot be loaded by the pruner whose own state is `mine`."""
    try:
        _check_parts(state, mine)
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:  # in something nested
        raise ValueError(
            f"The state of the Pruner has something of another kind in it ({type(error).__name__}: {error})."
        ) from error


def _check_parts(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or set(state) != set(mine):
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"This is no state of a Pruner: found {found}, needed the keys {sorted(mine)}.")
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise ValueError(f"The state has version {state['version']}; this shallower reads version {VERSION}.")
    for key in ("names", "sizes", "xi", "events"):
        if not isinstance(state[key], list):
            raise ValueError(f"The state's {key} are {state[key]!r}; a list is needed.")
    if state["names"] != mine["names"] or state["sizes"] != mine["sizes"]:
        theirs, ours = (list(zip(s["names"], s["sizes"], strict=False)) for s in (state, mine))
        raise ValueError(
            f"The state is of another model. Its blocks and their parameters are {theirs}, this model's are "
            f"{ours}. Build the same model, gate it as before, then load."
        )
    steps = state["num_steps"]
    if type(steps) is not int or steps < 0 or type(state["finalized"]) is not bool:
        raise ValueError(f"The state has num_steps={steps!r} and finalized={state['finalized']!r}.")
    when = state["finalized_at"]
    if (type(when) is int and 0 <= when <= steps) is not state["finalized"]:
        raise ValueError(f"The state has finalized={state['finalized']} and finalized_at={when!r}.")
    _check_theta(state["theta"], len(mine["names"]))
    _check_removals(state, mine)
    _check_vitals(state["vitals"], mine)
    _check_optimizer(state["theta_optimizer"], mine["theta_optimizer"], state["theta"])
    try:
        torch.Generator().set_state(state["generator"])
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"The state's generator cannot be read: {error}") from error


def _check_theta(theta: Any, number: int) -> None:
    fits = isinstance(theta, Tensor) and theta.shape == (number,) and theta.is_floating_point()
    if not fits or not bool(((theta >= 0) & (theta <= 1)).all()):
        raise ValueError(f"The state's theta is {theta}; needed are {number} rates in [0, 1].")


def _check_removals(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    fields = {"step", "block", "theta"}
    kinds = {"step": int, "block": str, "theta": float}
    for event in state["events"]:
        fits = isinstance(event, Mapping) and set(event) == fields
        if not fits or not all(isinstance(event[name], kind) for name, kind in kinds.items()):
            raise ValueError(f"The state's events are {state['events']}; each needs {sorted(fields)}.")
    if not all(isinstance(name, str) for name in state["xi"]):
        raise ValueError(f"The state's xi are {state['xi']!r}; names of blocks are needed.")
    gone = {event["block"] for event in state["events"]}
    back = [event["block"] for event in mine["events"] if event["block"] not in gone]
    if back or (mine["finalized"] and not state["finalized"]):
        raise ValueError(
            f"This pruner is further than the state: {back or 'all gates'} cannot come back. "
            "Build the model anew, gate it, then load."
        )
    if len(gone) != len(state["events"]):
        raise ValueError(f"The state removes a block twice: {state['events']}.")
    alive = [
        n for n, rate in zip(mine["names"], state["theta"].tolist(), strict=True) if n in gone and rate != 0
    ]
    if alive:
        raise ValueError(f"The state removed {alive}, but their rates are not 0.")
    strangers = sorted((gone | set(state["xi"])) - set(mine["names"]))
    if strangers:
        raise ValueError(f"The state speaks of {strangers}, which are no blocks of this model.")


def _check_vitals(vitals: Any, mine: Mapping[str, Any]) -> None:
    needed, later = {"rows", "change"}, {"square", "learned"}
    fits = isinstance(vitals, Mapping) and needed <= set(vitals) <= needed | later
    fits = fits and isinstance(vitals["rows"], Mapping) and set(vitals["rows"]) <= set(mine["names"])
    means = [vitals[name] for name in ("change", "square") if name in vitals] if fits else []
    fits = fits and all(_is_mean(m, len(mine["names"])) for m in means) and bool(means[0].isfinite().all())
    learned = vitals.get("learned", 0) if fits else 0
    fits = fits and type(learned) is int and learned >= 0
    fields = {"step", "theta", "norm", "change"}
    rows = [row for found in vitals["rows"].values() for row in found] if fits else []
    if not fits or not all(
        isinstance(row, Mapping)
        and fields <= set(row) <= fields | {"noise"}
        and all(isinstance(v, int | float) for v in row.values())
        for row in rows
    ):
        raise ValueError(
            f"The state's vitals are not rows of {sorted(fields)} for blocks of this model, a mean of the "
            "estimates for each block, and how many of them were learned from."
        )


def _is_mean(found: Any, number: int) -> bool:
    plain = isinstance(found, Tensor) and found.layout is torch.strided and not found.is_meta
    return plain and found.shape == (number,) and found.is_floating_point()


def check_loads(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise ValueError if the theta optimiser could not go on with its part of `state`; tried on a copy."""
    twin = copy.deepcopy(optimizer)
    try:
        twin.load_state_dict(copy.deepcopy(dict(state["theta_optimizer"])))
        for group in twin.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        twin.step()
        values = [v for group in twin.param_groups for v in group.values() if isinstance(v, float)]
        tensors = [v for entry in twin.state.values() for v in entry.values() if isinstance(v, Tensor)]
        tensors += [p for group in twin.param_groups for p in group["params"]]
        if not all(map(math.isfinite, values)) or not all(bool(t.isfinite().all()) for t in tensors):
            raise ValueError("it holds numbers that are not finite")
        if any(group.get("lr", 0.0) < 0 for group in twin.param_groups):
            raise ValueError("its learning rate is negative")
    except Exception as error:  # whatever an optimiser makes of a state that is not its own
        raise ValueError(
            f"The state's theta_optimizer cannot be gone on with ({type(error).__name__}: {error})."
        ) from error


def _check_optimizer(theirs: Mapping[str, Any], ours: Mapping[str, Any], theta: Tensor) -> None:
    if not isinstance(theirs, Mapping) or set(theirs) != set(ours):
        raise ValueError(f"The state's theta_optimizer is {theirs!r}, which is no state of an optimiser.")
    if not isinstance(theirs["state"], Mapping) or not isinstance(theirs["param_groups"], list):
        raise ValueError(f"The state's theta_optimizer is {theirs!r}, which is no state of an optimiser.")
    keys = [[sorted(group) for group in s["param_groups"]] for s in (theirs, ours)]
    moments = [
        v for entry in theirs["state"].values() for v in entry.values() if isinstance(v, Tensor) and v.dim()
    ]
    if keys[0] != keys[1] or any(m.shape != theta.shape for m in moments):
        raise ValueError(
            "The state was taken with another theta_optimizer; build the Pruner with the same one, then load."
        )
