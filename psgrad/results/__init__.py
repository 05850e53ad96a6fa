"""What a run yields: plain records and data frames, with one meaning per column. No torch, no files."""

from psgrad.results.analyze import PARAMETER_COLUMNS as PARAMETER_COLUMNS
from psgrad.results.analyze import SAMPLE_COLUMNS as SAMPLE_COLUMNS
from psgrad.results.analyze import AnalyzeResult as AnalyzeResult
from psgrad.results.analyze import TopSample as TopSample
from psgrad.results.analyze import disagrees as disagrees
from psgrad.results.analyze import has_classes as has_classes
from psgrad.results.analyze import rank_samples as rank_samples
from psgrad.results.analyze import top_samples as top_samples
from psgrad.results.audit import AuditBound as AuditBound
from psgrad.results.audit import DPAuditResult as DPAuditResult
from psgrad.results.audit import NeighbourPair as NeighbourPair
from psgrad.results.audit import NoiseAudit as NoiseAudit
from psgrad.results.planning import ParameterPlan as ParameterPlan
from psgrad.results.planning import PlanResult as PlanResult
from psgrad.results.privacy import STEP_COLUMNS as STEP_COLUMNS
from psgrad.results.privacy import STEP_KEYS as STEP_KEYS
from psgrad.results.privacy import DPPlanResult as DPPlanResult
from psgrad.results.privacy import DPStepResult as DPStepResult
from psgrad.results.privacy import NoisePlan as NoisePlan
from psgrad.results.progress import Progress as Progress
