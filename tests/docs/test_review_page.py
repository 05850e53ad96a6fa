"""docs/guides/review.md: its config is one, its columns are in the tables, its numbers are stored ones."""

from __future__ import annotations

import yaml

from psgrad.config import Config
from psgrad.config.analysis import ReviewConfig
from psgrad.run.results.review import ReviewResult
from tests.docs.pages import ROOT, blocks, stored

PAGE = (ROOT / "docs" / "guides" / "review.md").read_text(encoding="utf-8")
STORED = stored("review-cpu")


def test_the_config_of_the_page_is_one() -> None:
    section = yaml.safe_load(blocks(PAGE, "yaml")[0])["review"]
    assert set(section) | {"group"} == set(ReviewConfig.model_fields)
    assert ReviewConfig.model_validate(section).max_suspect == 5
    assert "review" in Config.model_fields


def test_the_columns_of_the_page_are_in_the_tables() -> None:
    described = ReviewResult.__doc__ or ""
    for name in ("predicted_effect", "worst_query", "suspect", "reasons"):
        assert f"`{name}`" in PAGE
        assert name in described


def test_the_numbers_of_the_page_are_the_stored_ones() -> None:
    convex, network, language = STORED["convex"], STORED["network"], STORED["language"]
    assert all(round(row["pearson"], 3) == round(row["slope"], 3) == 1 for row in convex)
    assert f"{len(convex)} changes of 1 to {max(row['rows'] for row in convex)} rows" in PAGE
    assert f"{len(network['changes'])} changes" in PAGE
    assert f"AUC {network['auc']:.2f}" in PAGE
    assert (
        f"rank correlation with the real margin {network['rank_correlation']:.2f}".replace("0.", ".") in PAGE
    )
    index, cost = network["index"], STORED["cost"]["predict_seconds"]
    shown = f"AUC {index['auc']:.2f}; rank correlation {index['rank_correlation']:.2f}".replace(" 0.", " .")
    assert shown in PAGE
    assert f"takes {cost['computed']:.0f} s, and {cost['by_index']:.0f} s by an index" in PAGE
    words = f"{language['among_first']} of the {language['false']} among the worst {language['first']} rows"
    assert words in PAGE
