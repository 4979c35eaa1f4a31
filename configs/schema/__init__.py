"""Every knob of glm46: one frozen pydantic tree, filled by one complete YAML per scale.

The modules are the sections of the tree and their larger parts; `scale` is the root. A section has up to two parts.
`recipe` changes results and enters the step keys; `resources` says where and how wide the work runs and never enters a
key. Field docstrings give unit, effect and source; "report" is the GLM-4.5 technical report (arXiv 2508.06471).
"""

from __future__ import annotations

from configs.schema.base import Domain, Frozen, PackagedEncoder
from configs.schema.chats import (
    ChatCollectionRecipe,
    ChatRecipe,
    DecontaminationRecipe,
    PreferenceCollectionRecipe,
    PreferenceRecipe,
)
from configs.schema.courses import PHASE_TEMPLATES, CourseRecipe, CourseSection, PhaseName, Waypoint
from configs.schema.data import ContractRecipe, DataRecipe, DataSection, SparkResources
from configs.schema.deduplication import DeduplicationRecipe, SemanticRecipe, SplitRecipe
from configs.schema.evaluation import (
    EvaluationRecipe,
    EvaluationResources,
    EvaluationSection,
    GateRecipe,
    MarginRecipe,
    PairEvaluationRecipe,
    PairScoringRecipe,
)
from configs.schema.filtering import FilterRecipe, HeuristicRecipe, PersonalDataRecipe, ScoreRecipe
from configs.schema.jobs import Device, JobResources, QueueResources
from configs.schema.model import ModelRecipe, ModelSection
from configs.schema.objectives import (
    MIN_TOKEN_CLIP,
    DpoObjective,
    EpisodeRecipe,
    ImportanceRecipe,
    Objective,
    PolicyObjective,
    PpoObjective,
    PretrainObjective,
    RejectionSamplingObjective,
    RewardObjective,
    RewardRecipe,
    SftObjective,
)
from configs.schema.packing import (
    Mixture,
    MixtureWaypoint,
    MixtureWeight,
    Packing,
    PackingRecipe,
    PairPackingRecipe,
    mixture_waypoints,
)
from configs.schema.phases import PhaseRecipe, PhaseSection, SolutionRecipe, TrainingRecipe
from configs.schema.prices import Prices
from configs.schema.problems import (
    EnvironmentName,
    PromptRecipe,
    ReasoningFamily,
    SeedVariationRecipe,
    SynthesisRecipe,
    TeacherLimits,
    TeacherRecipe,
    TeacherRequest,
)
from configs.schema.release import (
    CALIBRATED_FORMATS,
    CALIBRATED_GGUF_TYPES,
    GGUF_BLOCK,
    SERVED_GGUF_TYPE,
    CalibrationRecipe,
    GgufType,
    QuantizationRecipe,
    QuantizedFormat,
    ReleaseRecipe,
    ReleaseSection,
)
from configs.schema.scale import Scale
from configs.schema.scoring import (
    ClassifierKind,
    ClassifierRecipe,
    LanguageRecipe,
    NgramModelRecipe,
    NgramTrainingRecipe,
)
from configs.schema.serving import ServingResources, ServingSection
from configs.schema.sources import BoilerplateRecipe, ExtractionRecipe, IngestRecipe
from configs.schema.suites import AnswerBenchmark, Benchmark, FewShot, LikelihoodBenchmark, Suite
from configs.schema.tokens import NUM_SPECIAL_TOKENS, RepositoryRecipe, ShardRecipe, TokenizerRecipe
from configs.schema.training import (
    AdapterRecipe,
    AdapterTarget,
    OptimizerRecipe,
    PhaseQueue,
    ProfileResources,
    SpikeRecipe,
    TrainingResources,
    ValidationRecipe,
)

__all__ = [
    "CALIBRATED_FORMATS",
    "CALIBRATED_GGUF_TYPES",
    "GGUF_BLOCK",
    "MIN_TOKEN_CLIP",
    "NUM_SPECIAL_TOKENS",
    "PHASE_TEMPLATES",
    "SERVED_GGUF_TYPE",
    "AdapterRecipe",
    "AdapterTarget",
    "AnswerBenchmark",
    "Benchmark",
    "BoilerplateRecipe",
    "CalibrationRecipe",
    "ChatCollectionRecipe",
    "ChatRecipe",
    "ClassifierKind",
    "ClassifierRecipe",
    "ContractRecipe",
    "CourseRecipe",
    "CourseSection",
    "DataRecipe",
    "DataSection",
    "DecontaminationRecipe",
    "DeduplicationRecipe",
    "Device",
    "Domain",
    "DpoObjective",
    "EnvironmentName",
    "EpisodeRecipe",
    "EvaluationRecipe",
    "EvaluationResources",
    "EvaluationSection",
    "ExtractionRecipe",
    "FewShot",
    "FilterRecipe",
    "Frozen",
    "GateRecipe",
    "GgufType",
    "HeuristicRecipe",
    "ImportanceRecipe",
    "IngestRecipe",
    "JobResources",
    "LanguageRecipe",
    "LikelihoodBenchmark",
    "MarginRecipe",
    "Mixture",
    "MixtureWaypoint",
    "MixtureWeight",
    "ModelRecipe",
    "ModelSection",
    "NgramModelRecipe",
    "NgramTrainingRecipe",
    "Objective",
    "OptimizerRecipe",
    "PackagedEncoder",
    "Packing",
    "PackingRecipe",
    "PairEvaluationRecipe",
    "PairPackingRecipe",
    "PairScoringRecipe",
    "PersonalDataRecipe",
    "PhaseName",
    "PhaseQueue",
    "PhaseRecipe",
    "PhaseSection",
    "PolicyObjective",
    "PpoObjective",
    "PreferenceCollectionRecipe",
    "PreferenceRecipe",
    "PretrainObjective",
    "Prices",
    "ProfileResources",
    "PromptRecipe",
    "QuantizationRecipe",
    "QuantizedFormat",
    "QueueResources",
    "ReasoningFamily",
    "RejectionSamplingObjective",
    "ReleaseRecipe",
    "ReleaseSection",
    "RepositoryRecipe",
    "RewardObjective",
    "RewardRecipe",
    "Scale",
    "ScoreRecipe",
    "SeedVariationRecipe",
    "SemanticRecipe",
    "ServingResources",
    "ServingSection",
    "SftObjective",
    "ShardRecipe",
    "SolutionRecipe",
    "SparkResources",
    "SpikeRecipe",
    "SplitRecipe",
    "Suite",
    "SynthesisRecipe",
    "TeacherLimits",
    "TeacherRecipe",
    "TeacherRequest",
    "TokenizerRecipe",
    "TrainingRecipe",
    "TrainingResources",
    "ValidationRecipe",
    "Waypoint",
    "mixture_waypoints",
]
