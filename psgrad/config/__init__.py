"""The YAML file: its sections, and its validation, which reports all mistakes at once with file, line and a
suggestion.
"""

from psgrad.config.analysis import AnalyzeConfig as AnalyzeConfig
from psgrad.config.analysis import DetectorConfig as DetectorConfig
from psgrad.config.analysis import GateConfig as GateConfig
from psgrad.config.analysis import MeasureConfig as MeasureConfig
from psgrad.config.analysis import OutlierConfig as OutlierConfig
from psgrad.config.config import Config as Config
from psgrad.config.config import EngineConfig as EngineConfig
from psgrad.config.config import LossConfig as LossConfig
from psgrad.config.config import ReportConfig as ReportConfig
from psgrad.config.data import DataConfig as DataConfig
from psgrad.config.data import QueriesConfig as QueriesConfig
from psgrad.config.influence import MEASUREMENTS as MEASUREMENTS
from psgrad.config.influence import CheckpointConfig as CheckpointConfig
from psgrad.config.influence import EvaluationConfig as EvaluationConfig
from psgrad.config.influence import EvaluationKind as EvaluationKind
from psgrad.config.influence import IndexConfig as IndexConfig
from psgrad.config.influence import InfluenceConfig as InfluenceConfig
from psgrad.config.influence import MeasurementConfig as MeasurementConfig
from psgrad.config.influence import MethodConfig as MethodConfig
from psgrad.config.influence import TrainConfig as TrainConfig
from psgrad.config.model import TASKS as TASKS
from psgrad.config.model import ModelConfig as ModelConfig
from psgrad.config.model import Task as Task
from psgrad.config.privacy import RELATIONS as RELATIONS
from psgrad.config.privacy import ClippingConfig as ClippingConfig
from psgrad.config.privacy import NoiseConfig as NoiseConfig
from psgrad.config.privacy import OptimizerConfig as OptimizerConfig
from psgrad.config.privacy import PrivacyConfig as PrivacyConfig
from psgrad.config.privacy import SamplingConfig as SamplingConfig
from psgrad.config.privacy import UnitConfig as UnitConfig
from psgrad.config.reading import config_from as config_from
from psgrad.config.reading import load_config as load_config
from psgrad.config.reading import read_config as read_config
from psgrad.config.values import NamedSection as NamedSection
from psgrad.config.values import is_callable_spec as is_callable_spec
from psgrad.wording import did_you_mean as did_you_mean
from psgrad.wording import nearest as nearest
