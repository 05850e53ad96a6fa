"""The map of docs/decisions/0041-next-layout.md: each new module, and the modules of today that it is made
of.
"""

# ruff: noqa

T = "engine.transforms."
R = T + "rules."
G = "engine.gradients."
X = "engine.execution."
M = "engine.measures."
K = M + "known."
B = M + "builtin."
I = "engine.influence."
P = "engine.privacy."
W = "workflows."
RP = "reports."
Q = "quality."


def pre(prefix, *names):
    return [prefix + n for n in names]


MAP = {}


def m(new, *olds):
    MAP[new] = list(olds)


# transforms
m(T + "private_torch", T + "assumptions")
m(T + "levels", T + "levels", T + "branching")
m(T + "aliasing", T + "memory")
m(T + "tape", T + "record", T + "kept")
m(T + "grad", T + "differentiate")
m(T + "jvp", T + "pushforward")
m(T + "vmap", T + "vectorize")
m(T + "fresh_tensors", T + "fresh")
m(T + "operators", T + "operators", T + "autocast", T + "dense")
m(T + "custom_rules", T + "custom")
m(T + "autograd_outside", T + "recorded")
m(T + "capture_guard", T + "watch")
m(T + "random_draws", T + "draws", T + "generators")
m(T + "shape_checks", T + "shapes")
m(R + "registry", R + "registry", R + "coverage")
m(R + "composites", R + "composites", R + "branches")
m(R + "matmul", R + "matmul", R + "pairs")
m(R + "convolution", R + "convolution", R + "windows")
m(R + "scatter", R + "scatter", R + "histograms")
m(R + "complex", R + "complex", R + "fourier")
m(R + "interpolation", R + "sampling")
m(R + "labelled_draws", R + "draws")

# gradients
m(G + "per_sample", G + "per_sample", G + "settling")
m(G + "deferred", G + "placed")
m(G + "overlap", G + "meeting", G + "pairs")
m(G + "precision_guard", G + "doubts")
m(G + "flat", "engine.flat")
m(G + "deferral.entry", G + "deferral.starts")
m(G + "deferral.linear_maps", *pre(G + "deferral.linear.", "base"))
m(G + "deferral.term_maps", G + "deferral.linear")
m(G + "terms.product_maps", G + "deferral.linear.product")
m(G + "terms.convolution_maps", G + "deferral.linear.convolution")
m(G + "terms.rows_maps", G + "deferral.linear.rows")
m(G + "terms.other_maps", G + "deferral.linear.others")
m(G + "terms.elementwise", *pre(G + "terms.", "dense", "multiples", "hadamard"))
m(G + "terms.base", *pre(G + "terms.", "base", "grouped"))
m(G + "deferral", G + "deferral", G + "deferral.on_the_way")
m(G + "deferral.propagation", *pre(G + "deferral.on_the_way.", "each", "sums", "shapes"))
m(G + "deferral.products", *pre(G + "deferral.on_the_way.", "products", "parts"))
m(G + "inner.products", *pre(G + "inner.", "products", "prices"))
m(G + "inner.factored", *pre(G + "inner.", "factored", "balance"))
m(G + "inner.regions", *pre(G + "inner.", "regions", "slabs", "indexed", "tiles"))
m(G + "inner.materialised", G + "inner.written")
m(G + "costs", G + "planning.costs")
m(G + "machine", *pre(G + "planning.", "machines"))
m(X + "calibration", G + "planning.calibration")
m(G + "projections.base", *pre(G + "projections.", "base", "workspace", "entries"))
m(G + "projections.slices", *pre(G + "projections.", "slices", "places"))
m(G + "projections.entrywise", *pre(G + "projections.", "dense", "sparse"))

# execution
m(X + "memory", G + "memory")
m(X + "loading", G + "loading")
m(X + "streaming", G + "streaming")
m(X + "replay", G + "replay")
m(X + "chunk_plan", G + "planning.plan")
m(X + "run_plan", G + "planning.forecast")
m(X + "pass_costs", *pre(G + "planning.", "kernels", "ledger"))
m(X + "objective", "engine.objective")
m(X + "self_check", "engine.verify")

# measures
m(M + "measure", M + "measure", M + "refusals", M + "finite")
m(M + "passes", M + "second_look", M + "row_passes")
m(M + "sums", M + "sums", M + "by_class", M + "resampling")
m(M + "output_values", M + "predictions", M + "class_outputs")
m(M + "attribution", M + "attribution", M + "attribution.attribution")
m(M + "attribution_points", M + "attribution.places", M + "attribution.points")
m(M + "hessians", M + "hessians", M + "krylov")
m(M + "checkpoint_passes", *pre(M + "moments.", "ensemble", "grouping", "resident", "refusals"))
m(M + "checkpoint_history", M + "moments", *pre(M + "moments.", "history", "agreement", "summaries"))
m(M + "projected", M + "projected", M + "chosen")
m(B[:-1], K[:-1])
m(B + "outputs", *pre(K, "confidence", "margin", "el2n"))
m(B + "norms", *pre(K, "layer_norms", "relative_norm"))
m(B + "directions", *pre(K, "cosine_to_mean", "cosine_to_class_mean", "loo_mean_change", "signal_to_noise"))
m(B + "dataset", *pre(K, "noise_scale", "covariance_spectrum"))
m(B + "neighbours", *pre(K, "neighbour_distance", "projected_gradients"))
m(B + "ntk", K + "ntk")
m(B + "curvature", *pre(K, "hessian_top_eigenvalue", "hessian_trace"))
m(B + "attribution", *pre(K, "input_gradient", "gradient_x_input", "integrated_gradients", "smooth_grad"))
m(B + "checkpoints", *pre(K, "moments", "grand", "el2n_over_checkpoints", "forgetting", "trajectory"))
m(B + "vog", K + "vog")

# influence
m(X + "examples", "engine.examples")
m(I + "method", I + "method", I + "screening")
m(I + "ranking", I + "ranking", I + "scoring")
m(I + "amounts", I + "calibration", I + "removal_check")
m(I + "inverses", *pre(I + "fits.", "matrix", "kernel", "iterative", "output"))
m(I + "leverage", *pre(I + "fits.", "setting", "corrected"), I + "leverage", I + "damping")
m(I + "leverage_estimate", I + "fits.leverage_estimate")
m(I + "curvature.matrices", *pre(I + "curvature.", "dense", "outer_products"))
m(I + "solvers.spectrum", I + "curvature.spectrum", I + "solvers.refusals")
m(I + "curvature.rows", *pre(I + "curvature.", "rows", "output_derivatives"))
m(I + "curvature.products", *pre(I + "curvature.", "products", "row_products", "pass_products"))
m(I + "curvature.kronecker_blocks", *pre(I + "curvature.kronecker.", "blocks", "bases"))
m(I + "curvature.kronecker_factors", *pre(I + "curvature.kronecker.", "covariances", "forms"))
m(
    I + "curvature.kronecker_fitting",
    I + "curvature.kronecker",
    *pre(I + "curvature.kronecker.", "fitting", "sampled"),
)
m(I + "solvers.direct", *pre(I + "solvers.", "exact", "dual"))
m(I + "solvers.conjugate_gradient", *pre(I + "solvers.", "conjugate_gradient", "preconditioner"))
m(I + "solvers.lissa", *pre(I + "solvers.", "lissa"))
m(I + "solvers.costs", *pre(I + "solvers.", "work"))
m(I + "methods.gradient_products", *pre(I + "methods.", "gradient_dot", "gradient_cosine", "tracin"))
m(I + "methods.projected", *pre(I + "methods.", "projected_influence", "trak"))
m(I + "index.stored", *pre(I + "index.", "spec", "stored"))
m(I + "index.rows", *pre(I + "index.", "rows", "projector", "margin"))
m(I + "index.build", *pre(I + "index.", "build", "opened"))
m(I + "evaluation.jobs", *pre(I + "evaluation.", "jobs", "recipe", "members"))
m(I + "evaluation.retraining", *pre(I + "evaluation.", "retraining", "ensemble"))
m(I + "evaluation.metrics", *pre(I + "evaluation.", "lds", "loo", "removal"))
m(I + "evaluation.mislabel", *pre(I + "evaluation.", "mislabel", "controls"))
m(I + "evaluation.statistics", *pre(I + "evaluation.", "resampling", "scored"))

# privacy
m(P + "clipping", P + "clipping", P + "adaptive")
m(P + "clipped_sums", P + "clipped", P + "float32")
m(P + "records", P + "records", P + "relation")
m(P + "batches", P + "record_streams", P + "source")
m(P + "step", P + "step", P + "optimizers")
m(P + "sampling", P + "sampling", P + "schedules")
m(P + "snapshot", P + "snapshot", P + "published")
m(P + "accounting.composition", *pre(P + "accounting.", "composed", "curve"))
m(P + "accounting.epsilon", *pre(P + "accounting.", "epsilon", "library", "moments"))
m(P + "accounting.calibration", *pre(P + "accounting.", "calibration", "adaptive"))
m(P + "audit.game", *pre(P + "audit.", "game", "canaries"))
m(P + "audit.one_run", *pre(P + "audit.", "one_run", "profiles"))

# inputs
m("inputs.models.factory", "inputs.models", "inputs.trainable", "inputs.retraining")
m("inputs.models.checkpoints", "inputs.checkpoints")
m("inputs.models.checkpoint_headers", "inputs.checkpoint_headers")
m("inputs.models.identity", "inputs.model_identity")
m("inputs.code", "inputs.imports", "inputs.code_specs")
m("inputs.sources.arrays", "inputs.arrays")
m("inputs.sources.tables", "inputs.tables")
m("inputs.sources.files", "inputs.files", "inputs.columns")
m("inputs.sources.datasets", "inputs.datasets")
m("inputs.sources.headers", "inputs.data_headers")
m("inputs.sources.load", "inputs.data")
m("inputs.rows", "inputs.samples")

# quality
m(Q + "detectors", Q + "detectors", Q + "robust_z", Q + "opinions")
m(Q + "references", Q + "references", Q + "groups")
m(Q + "gates", Q + "gates", Q + "verdicts", Q + "shares")
m(Q + "findings", Q + "findings", Q + "fingerprints", Q + "ignore")
m(Q + "comparison", Q + "comparing")
m(Q + "judging", Q + "judging", Q + "ranking")

# storage
m("storage.files", "storage.files", "storage.crash", "storage.csv_lines")
m("storage.folders", "storage.folders", "storage.place")
m("storage.finished", "storage.finished", "storage.verdicts")

# results
m("results.analyze", *pre("results.", "analyze", "measures", "progress", "records"))
m("wording", "wording", "results.short_repr")
m("results.findings", *pre("results.", "findings", "baseline", "comparison"))
m("results.influence", *pre("results.", "influence", "evaluation"))
m("results.privacy", *pre("results.", "privacy", "audit", "planning"))

# reports
m(RP + "drawing", RP + "drawing", RP + "sheets")
m(RP + "page", RP + "page", RP + "pictures", RP + "tables")
m(RP + "analyze_page", RP + "html", RP + "verdicts", RP + "write")
m(RP + "outlier_sections", RP + "judgement", RP + "class_tables", RP + "rankings")
m(RP + "sample_table", RP + "sample_table", RP + "scatter")
m(RP + "measures", RP + "measure_plots", RP + "measure_sections", RP + "measure_words")
m(RP + "attribution", RP + "attribution", RP + "attribution_colours", RP + "attribution_text")
m(RP + "comparison", RP + "comparison", RP + "comparison_page")
m(RP + "evaluation", RP + "evaluation", RP + "evaluation_plots")
m(RP + "influence_page", RP + "influence_html", RP + "influence")
m(RP + "influence_plots", RP + "influence_plots", RP + "influence_sheets")
m(RP + "influence_terminal", RP + "influence_terminal", RP + "influence_words")
m(RP + "costs", RP + "planning", RP + "auditing")
m(RP + "terminal", RP + "terminal", RP + "run_record", RP + "listing")

# workflows
m(W + "analyze", W + "analysis")
m(W + "measuring", W + "measuring", W + "row_facts")
m(W + "measures", *pre(W, "measure_setup", "own_measure"))
m(W + "checkpoints", W + "moments")
m(W + "check", W + "checking")
m(W + "diff", W + "comparing", W + "reporting")
m(W + "plan", W + "foretelling", W + "private_planning")
m(W + "influence", W + "influence_run")
m(W + "influence_setup", W + "influence_setup", W + "influence_method")
m(W + "influence_ranking", *pre(W, "influence_ranking", "influence_check", "shown_inputs"))
m(W + "influence_index", W + "influence_indexing")
m(W + "influence_evaluate", *pre(W, "influence_evaluation", "evaluation_mislabel"))
m(W + "evaluation_truths", *pre(W, "evaluation_truths", "evaluation_tuning"))
m(W + "dp_step", W + "private_training")
m(W + "private_statement", W + "private_statement", W + "private_identity")
m(W + "dp_audit", W + "auditing")
m(W + "identity", *pre(W, "identity", "resuming", "origin", "record"))
m(W + "setup", W + "setup", W + "interruptions")
m(W + "validate", *pre(W, "validating", "deep_validating"))

# config
m("config.influence", *pre("config.", "influence", "evaluation", "method"))
m("config.mechanism", *pre("config.", "mechanism", "sampling"))
m("config.schema", *pre("config.", "schema", "describing", "commented"))
m("config.values", *pre("config.", "values", "named"))
# cli
m("cli.options", "cli.options", "cli.completing")

PACKAGES = []
PACKAGE_DOCS = {}
RENAME = {
    Q + "detectors:Array": "FloatArray",
    I + "removal_check:_ROUNDING": "_LOSS_ROUNDING",
    P + "schedules:FIELDS": "SCHEDULE_FIELDS",
}
