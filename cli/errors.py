"""Which exceptions are a user's business: those get one clear line, everything else is a bug and shows its trace."""

from __future__ import annotations

EXIT_INTERRUPTED = 130


class CliError(Exception):
    """What the user asked for cannot be done; the message says why and what to do."""


EXPECTED = {
    "motley.bench.meshes.local_mesh.MeshError",
    "motley.bench.reports.plots.PlotError",
    "motley.bench.reports.standard.ReportError",
    "motley.bench.measurements.serving.serve.LoadError",
    "motley.bench.random_models.writing.SynthError",
    "motley.cli.errors.CliError",
    "motley.daemon.lease.lease.LeaseError",
    "motley.daemon.node.joining.control.JoinRefused",
    "motley.daemon.node.joining.control.OrchestratorLost",
    "motley.daemon.models.keys.ConfigError",
    "motley.daemon.text.tokenizer.TokenizerError",
    "motley.daemon.node.joining.pairing.PairingRefused",
    "motley.daemon.node.joining.trust.TrustError",
    "motley.daemon.weights.cache.CacheError",
    "motley.daemon.weights.checkpoints.checkpoint.CheckpointError",
    "motley.daemon.weights.hub.ModelNotFound",
    "motley.daemon.weights.share_file.ShareFileError",
    "motley.plugins.engine.EngineError",
    "motley.daemon.node.workers.worker.WorkerError",
    "motley.orchestrator.api.access.certificate.CertificateError",
    "motley.orchestrator.app.OrchestratorError",
    "motley.orchestrator.trust.identity.IdentityError",
    "motley.orchestrator.planning.placement.terms.PlacementError",
    "motley.orchestrator.planning.cutting.shares.PlanError",
    "motley.orchestrator.store.store.StoreError",
    "motley.orchestrator.traces.TracesError",
    "motley.training.errors.TrainingError",
}
"""The names of expected exceptions; importing them here would load every part of Motley for every command."""


def explain(error: BaseException) -> str | None:
    """The message for an expected error, None for a bug."""
    for kind in type(error).__mro__:
        if f"{kind.__module__}.{kind.__qualname__}" in EXPECTED:
            return str(error)
    return None
