"""The YAML file: its sections, and its validation, which reports all mistakes at once with file, line and a
suggestion.
"""

from psgrad.config.analysis import (
    AnalyzeConfig,
    DetectorConfig,
    GateConfig,
    MeasureConfig,
    OutlierConfig,
    ReferenceConfig,
)
from psgrad.config.data import DATA_SUFFIXES, DataConfig
from psgrad.config.influence import (
    MEASUREMENTS,
    CheckpointConfig,
    EvaluationConfig,
    EvaluationKind,
    IndexConfig,
    InfluenceConfig,
    MeasurementConfig,
    MethodConfig,
    QueriesConfig,
    TrainConfig,
    TrainingConfig,
    TuningConfig,
)
from psgrad.config.mechanism import (
    RELATIONS,
    AdaptiveConfig,
    AugmentationConfig,
    ClippingConfig,
    NoiseConfig,
    SamplingConfig,
    ScheduleConfig,
    UnitConfig,
)
from psgrad.config.model import TASKS, ModelConfig, NewAdapterConfig, Task
from psgrad.config.privacy import OptimizerConfig, PrivacyConfig
from psgrad.config.reading import config_from, load_config, read_config
from psgrad.config.sections import (
    LOSS_OPTIONS,
    EngineConfig,
    LossConfig,
    ReportConfig,
)
from psgrad.config.values import NamedSection, is_callable_spec, nearest
from psgrad.config.whole import Config

__all__ = [
    "DATA_SUFFIXES",
    "LOSS_OPTIONS",
    "MEASUREMENTS",
    "RELATIONS",
    "TASKS",
    "AdaptiveConfig",
    "AnalyzeConfig",
    "AugmentationConfig",
    "CheckpointConfig",
    "ClippingConfig",
    "Config",
    "DataConfig",
    "DetectorConfig",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationKind",
    "GateConfig",
    "IndexConfig",
    "InfluenceConfig",
    "LossConfig",
    "MeasureConfig",
    "MeasurementConfig",
    "MethodConfig",
    "ModelConfig",
    "NamedSection",
    "NewAdapterConfig",
    "NoiseConfig",
    "OptimizerConfig",
    "OutlierConfig",
    "PrivacyConfig",
    "QueriesConfig",
    "ReferenceConfig",
    "ReportConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "Task",
    "TrainConfig",
    "TrainingConfig",
    "TuningConfig",
    "UnitConfig",
    "config_from",
    "is_callable_spec",
    "load_config",
    "nearest",
    "read_config",
]
