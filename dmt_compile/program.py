"""``towerize`` and the program it returns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from .analysis import Analysis, analyse, left_flat, record_shapes
from .capture import Captured, capture
from .compilation import Compilation, few, recaptured, stages_by_mode
from .errors import InputError, PlanError
from .graphs import clone_sharing_tensors, deepcopy_values
from .lookups import LookupSet
from .observe import ExampleInputs, split_inputs
from .partition import make_plan
from .plan import TowerPlan
from .seeds import whole_seed
from .stage import Stage
from .topology import Topology
from .verify.deal import check_batch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from .complexity import Complexity
    from .interactions import Interaction
    from .render.diff import StageDiff
    from .runtime.rank_module import RankModule
    from .towers.choose import TowerModules
    from .towers.model import TowerModel
    from .verify.certificate import Certificate
    from .verify.equivalence import OptimizerFactory


def towerize(
    model: nn.Module,
    topology: Topology,
    *,
    towers: int | Sequence[Sequence[str]] | TowerPlan | None = None,
    partition: str = "balanced",
    example_inputs: ExampleInputs | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_ids: bool | None = None,
    tower_module: TowerModules | None = None,
    expand: bool = False,
    init: Literal["layer", "preserve"] = "layer",
    seed: int = 0,
) -> TowerProgram:
    """Compile a flat recommender into a tower-partitioned SPTT program (DMT, arXiv 2403.00877, section 3.1).

    The model is not changed and none of its tensors is copied; it may live on the meta device.

    A model none of whose tables can leave its rank is left flat, with a ``UserWarning`` that names each and why: all stages are its
    own graph, and :meth:`TowerProgram.distribute` trains it data-parallel.

    Args:
        model: an ``nn.Module`` that reads its tables through TorchRec ``EmbeddingBagCollection`` or ``EmbeddingCollection``
            modules, ``nn.Embedding``, ``nn.EmbeddingBag``, their functional forms, or by indexing a parameter.
        topology: hosts and ranks per host.
        towers: None for one tower per host; a number; one list of feature names per tower; or a :class:`TowerPlan`.
        partition: how tables are spread where ``towers`` leaves it open: "balanced" evens out lookup cost and memory, "strided"
            deals them in turn (the paper's naive assignment).
        example_inputs: one batch as ``forward`` takes it, a tuple of positional or a dict of keyword arguments. Needed to spread
            what is no ``EmbeddingBagCollection``, and to show where features mix. A clone runs on it in evaluation mode several
            times: on the batch, on its halves, and with zeros and ones in place of its values.
        example_kwargs: keyword arguments beside positional ``example_inputs``.
        dynamic_ids: whether the number of ids of one sample (the length of padded histories) may change from batch to batch and
            from rank to rank. None is for where the model itself takes any number: a clone is tried on a few samples with histories
            that are one longer, and one shorter, than the example's. With False the number is that of the example, and another one
            is refused; with True it may change whatever the model says. Lookups of such ids whose rows the model does not pool at
            once need a further round of exchanges. Plan and rounds follow the number in the example, so that has to be the same on
            all ranks.
        tower_module: a dense module per tower that makes fewer or narrower vectors of its features before they cross hosts
            (section 3.2): :class:`DLRMTower`, :class:`CrossTower`, :class:`PassThrough`, or any function f(num_features, width)
            -> module whose module declares ``vectors`` and ``width``; one for all towers, a list with one for each, or a dict by
            tower. The interaction and its neighbours are re-sized. This changes the model: it is to be trained anew. The tables,
            and what keeps its shape, are the flat model's own tensors, which training changes: ``copy.deepcopy(model)`` keeps it.
        expand: bring every tower's vectors back to their old width behind the exchange, by a layer of the tower's own, and leave
            the interaction as it is. This is also done where new sizes do not follow from the graph.
        init: "layer" draws re-sized layers as their class does; "preserve" begins as close to the flat model as linear algebra
            allows: exactly with it where modules do not compress, and with a truncated singular value decomposition of the vectors
            that ``example_inputs`` look up where they do. Needs tower modules with a method ``set_linear(matrix)``, which lets them
            compute ``matrix @ x`` for the columns x of their features, feature by feature; matrix is (vectors * width, columns of
            the features). They are tried.
        seed: for the parameters of tower modules and of layers that are re-sized.

    Raises:
        CaptureError: the model cannot be traced to its lookups, has none, or is already sharded.
        PlanError: ``towers``, ``partition`` or ``tower_module`` does not fit the model or the topology; ``seed`` is no whole
            number.
        TopologyError: the topology cannot have that many towers.
        PassError: a rewrite found something that it cannot handle; names the user's file and line.
    """
    if not isinstance(topology, Topology):
        raise PlanError(f"topology must be a dmt_compile.Topology, got {type(topology).__name__}")
    seed = whole_seed(seed, PlanError)
    inputs = split_inputs(example_inputs, example_kwargs)
    captured = capture(model, inputs)
    analyses = analyse(captured, inputs, dynamic_ids)
    plan = make_plan(analyses[True].lookups, topology, towers, partition)
    if not analyses[True].lookups.lookups:
        warnings.warn(left_flat({**analyses[False].replicated, **analyses[True].replicated}), stacklevel=2)
    sample = few(inputs, analyses)
    made = None
    if tower_module is not None and not analyses[True].lookups.lookups:
        raise PlanError("tower_module= needs features on towers, but none of the model's tables is spread (the warning says why)")
    if init not in ("layer", "preserve"):
        raise PlanError(f"init must be 'layer' or 'preserve', got {init!r}")
    if init == "preserve" and inputs is None:
        raise PlanError("init='preserve' keeps what is seen in the vectors that example_inputs look up: give example_inputs=")
    if tower_module is not None:
        from .towers.model import Task, tower_model

        lookups = {mode: analysis.lookups for mode, analysis in analyses.items()}
        layouts = {mode: analysis.layout for mode, analysis in analyses.items()}
        keep = inputs if init == "preserve" else None
        made = tower_model(Task(captured, lookups, layouts, plan, tower_module, sample, seed, keep), expand=expand)
        if inputs is not None:
            for mode, graph in made.captured.graphs.items():
                record_shapes(graph, made.captured.root, inputs, layouts[mode])
    elif expand or init != "layer":
        raise PlanError("expand and init say what becomes of what a tower module has compressed: give tower_module=")
    return TowerProgram(captured, analyses, plan, sample, made)


class TowerProgram(nn.Module):
    """A flat model and its rewritten stages.

    A model whose forward reads ``self.training`` has two sets of stages; everything here speaks of those of the current mode.

    Called as a module it runs the "towers" stage on one device, with the flat model's results. Parameters, buffers and
    ``state_dict()`` are the flat model's own, by the same names; with tower modules, the tower model's: ``dmt_towers.*`` beside
    them, and re-sized layers. ``load_state_dict`` then raises :class:`PlanError` for the weights of towers of other features.
    """

    def __init__(
        self,
        captured: Captured,
        analyses: Mapping[bool, Analysis],
        plan: TowerPlan,
        sample: Any = None,
        made: TowerModel | None = None,
    ) -> None:
        super().__init__()
        root = captured.root if made is None else made.captured.root
        # The containers are shared with the clone that the graphs run over, so .to(), .train() and load_state_dict reach it.
        self.__dict__["_parameters"] = root._parameters
        self.__dict__["_buffers"] = root._buffers
        self.__dict__["_modules"] = root._modules
        self.__dict__["_non_persistent_buffers_set"] = root._non_persistent_buffers_set
        self.training = root.training
        self._dmt = Compilation(captured, analyses, plan, stages_by_mode(captured, analyses, plan, made), sample, made)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check_batch(args, kwargs, self._dmt.analysis.layout)
        return self.stages["towers"].graph_module(*args, **kwargs)

    def train(self, mode: bool = True) -> TowerProgram:
        super().train(mode)
        self._dmt.program.root.training = mode
        for stages in self._dmt.stages.values():
            for stage in stages.values():
                stage.graph_module.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TowerProgram:
        made, captured = self._dmt.tower_model, self._dmt.captured
        if made is None:
            captured = recaptured(captured, deepcopy_values(captured.root, memo))
        else:
            made = replace(made, captured=recaptured(made.captured, deepcopy_values(made.captured.root, memo)))
        return TowerProgram(captured, self._dmt.analyses, self.plan, self._dmt.sample, made)

    @property
    def plan(self) -> TowerPlan:
        """Which features are in which tower, and which rank owns which table."""
        return self._dmt.plan

    @property
    def topology(self) -> Topology:
        return self._dmt.plan.topology

    @property
    def lookups(self) -> LookupSet:
        """The embedding lookups that were found in the model."""
        return self._dmt.analysis.lookups

    @property
    def replicated(self) -> Mapping[str, str]:
        """Embedding tables that stay on every rank as dense parameters, with the reason."""
        return self._dmt.analysis.replicated

    @property
    def whole(self) -> Mapping[str, str]:
        """Tables of several fields that are not taken apart by field, with the reason."""
        return self._dmt.analysis.whole

    @property
    def stages(self) -> Mapping[str, Stage]:
        """The graphs "flat", "towers", "classic", "sptt" and "lowered", in this order.

        With tower modules there are two more: "model", the tower model on one device, behind "flat", and "modules", in which each
        tower's module runs before the peer exchange, behind "sptt".
        """
        return self._dmt.stages[self.training]

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """Where the model mixes its features, and how: see :class:`dmt_compile.interactions.Interaction`.

        Found at the first use, by running the flat graph on three samples of the example inputs (or on made-up ones). Several
        stand in the order of the graph, linear terms last. Nothing is raised: what cannot be run is one record of kind "unknown".
        """
        from .interactions import find_interactions

        mode, found = self.training, self._dmt.interactions
        if mode not in found:
            analysis = self._dmt.analyses[mode]
            flat = self._dmt.captured.graphs[mode]
            found[mode] = find_interactions(flat, self._dmt.captured.root, analysis.lookups, self._dmt.sample, analysis.layout)
        return found[mode]

    @property
    def tower_model(self) -> TowerModel | None:
        """What tower modules take and make and what was re-sized; None in a program that is the flat model."""
        return self._dmt.tower_model

    @property
    def leaves(self) -> Mapping[str, str]:
        """Submodules that were kept whole because they could not be traced, with the reason."""
        return self._dmt.captured.leaves

    def complexity(self) -> Complexity:
        """Parameters, FLOPs and bytes of one sample, of the flat model and of its towers; a rich renderable, and text by ``str()``.

        FLOPs are counted by torch's counter while the graphs run forward and backward on tensors without values, so the model may
        live on the meta device. Nothing of the model is changed. What is counted: see :class:`dmt_compile.complexity.Cost`. It is
        that of the mode that the program is in.

        Raises:
            CaptureError: the graph cannot be run on made-up inputs (give ``example_inputs``), or needs values that it has not.
        """
        from .complexity import complexity

        return complexity(self.stages, self._dmt.sample, self._dmt.analysis.layout)

    def verify(
        self, *args: Any, steps: int = 2, optimizer: OptimizerFactory | None = None, seed: int = 0, **kwargs: Any
    ) -> Certificate:
        """Compare the program of every rank with the flat model on one batch, in this process.

        The batch is given as the flat model takes it; its samples are dealt over the ranks contiguously (the first B mod G
        ranks get one more). Outputs must be the same bits at every stage. Gradients of every parameter and the parameters
        after ``steps`` optimizer steps must agree to a tolerance, because sums over samples change their order; table
        gradients are compared once more with whole numbers in float64, bit for bit. Needs memory for a few copies of the model.

        Args:
            steps: optimizer steps to take; 0 skips that check.
            optimizer: makes an optimizer from parameters; plain SGD by default.
            seed: for cotangents and for random layers (rank r draws as after ``torch.manual_seed(seed + r)``).

        Raises:
            InputError: the inputs cannot be dealt over the ranks or hold no sample, the flat model does not run on what a rank
                gets of them, ``steps`` is no number of steps, ``seed`` no whole number, or the model has no values (meta device).
        """
        import torch

        from .verify.deal import batch_size, deal
        from .verify.equivalence import Verifier, default_optimizer

        seed = whole_seed(seed, InputError)
        # The caller may have switched gradients off.
        with torch.inference_mode(False), torch.enable_grad():
            layout = self._dmt.analysis.layout
            inputs = deal(args, kwargs, self.topology.world_size, layout)
            verifier = Verifier(self.stages, inputs, [batch_size(*own, layout) for own in inputs], seed, layout.names)
            return verifier.certify(steps, optimizer or default_optimizer)

    def simulate(self, *args: Any, stage: str = "lowered", **kwargs: Any) -> list[Any]:
        """Run a stage on all ranks in lock-step in this process; the outputs by rank.

        The batch is dealt as in :meth:`verify`. Autograd works across ranks.

        Raises:
            PlanError: no stage of that name runs on ranks.
            VerificationError: the ranks do not agree on a collective.
        """
        from .verify.cluster import simulate
        from .verify.deal import deal

        if stage not in self.stages:
            raise PlanError(f"stage must be one of {', '.join(self.stages)}, got {stage!r}")
        inputs = deal(args, kwargs, self.topology.world_size, self._dmt.analysis.layout)
        roots = [clone_sharing_tensors(self._dmt.program.root, copy_buffers=True) for _ in inputs]
        return simulate(self.stages[stage], inputs, roots)

    def distribute(
        self,
        process_group: ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        check_ids: bool = True,
        find_unused_parameters: bool = False,
    ) -> RankModule:
        """This rank's module, under an initialised process group. A collective call: every rank of the group makes it.

        The result is called with the rank's local batch as the flat model is called. Its parameters are the rank's own
        tables and the dense layers. See :class:`RankModule`.

        Args:
            process_group: the ranks to run on, by default all; their number must be the topology's world size.
            device: where parameters on the meta device are materialised.
            timeout: of every exchange; by default the process group's.
            check_ids: refuse ids outside their table before they are sent (one pass over the ids). Always done in a program
                whose tables are parts of a parameter.
            find_unused_parameters: as for DistributedDataParallel, for models that do not use every dense layer in every step.

        Raises:
            DistributedError: no process group, a world size other than the topology's, or ranks with different plans or models.
        """
        from .runtime.rank_module import distribute

        return distribute(
            {mode: stages["lowered"] for mode, stages in self._dmt.stages.items()},
            process_group,
            device=device,
            timeout=timeout,
            check_ids=check_ids,
            find_unused_parameters=find_unused_parameters,
            layouts={mode: analysis.layout for mode, analysis in self._dmt.analyses.items()},
        )

    def diff(self, before: str = "flat", after: str | None = None) -> StageDiff:
        """What changed between two stages: a rich renderable, and text by ``str()``.

        By default ``after`` is "sptt", or "modules" if there are tower modules.

        Raises:
            PlanError: no such stage.
        """
        from .render.diff import diff_stages

        if after is None:
            after = "modules" if "modules" in self.stages else "sptt"
        for name in (before, after):
            if name not in self.stages:
                raise PlanError(f"stage must be one of {', '.join(self.stages)}, got {name!r}")
        return diff_stages(self.stages[before], self.stages[after])

    def __str__(self) -> str:
        from .render.summary import summary_text

        return summary_text(self)

    def __rich__(self) -> object:
        from .render.summary import summary_renderable

        return summary_renderable(self)
