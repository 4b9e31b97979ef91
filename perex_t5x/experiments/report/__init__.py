"""Reports people look at: one HTML page for sweeps and runs, and figures for papers. See docs/reports.md."""

from __future__ import annotations

from collections.abc import Sequence


def make(paths: Sequence[str], *, title: str | None = None, figures: str | None = None, command: str = "") -> str:
    """The report of these folders as the text of an HTML page; figures go to a folder, if one is given.

    Raises `ConfigError` for folders that are missing or hold no runs, all at once.
    """
    # Here, since `python -m` imports this module before it can say that an extra is missing.
    from perex_t5x.experiments.report import basins, collapse, curves, dataset, goodput_bars, load, noise
    from perex_t5x.experiments.report import page as pages
    from perex_t5x.experiments.report import plot as plots

    plots.converter()  # before minutes of reading
    studies = load.load_folders(paths)
    data = dataset.gather(studies)
    all_plots = [
        curves.learning_curves(data),
        basins.rate_loss_basins(data),
        collapse.collapse_plot(data),
        noise.noise_scale(data),
        noise.snr_histograms(data),
        goodput_bars.goodput_bars(data),
    ]
    if figures:
        drawn = [plot for plot in all_plots if isinstance(plot, plots.Plot)]
        plots.write_figures(figures, drawn, plots.group_fields(data))
    names = ", ".join(study.name for study in studies[:4]) + (", ..." if len(studies) > 4 else "")
    return pages.page(title or (studies[0].title if len(studies) == 1 else names), data, all_plots, command)
