"""What a run returns: dataclasses and data frames, with one meaning for each column. No torch, no files."""

from psgrad.run.progress import Progress as Progress
from psgrad.run.progress import ShowProgress as ShowProgress
from psgrad.run.results.analyze import PARAMETER_COLUMNS as PARAMETER_COLUMNS
from psgrad.run.results.analyze import SAMPLE_COLUMNS as SAMPLE_COLUMNS
from psgrad.run.results.analyze import AnalyzeResult as AnalyzeResult
from psgrad.run.results.analyze import MeasureResult as MeasureResult
from psgrad.run.results.analyze import TopSample as TopSample
from psgrad.run.results.analyze import disagrees as disagrees
from psgrad.run.results.analyze import has_classes as has_classes
from psgrad.run.results.analyze import top_samples as top_samples
from psgrad.run.results.check import RULES as RULES
from psgrad.run.results.check import CheckResult as CheckResult
from psgrad.run.results.check import Finding as Finding
from psgrad.run.results.check import GateOutcome as GateOutcome
from psgrad.run.results.check import Location as Location
