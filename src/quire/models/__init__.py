"""Tables of the classes of models, classifiers and draft models, by architecture name."""

from quire.checkpoint.families import FAMILIES
from quire.registry import LazyTable

MODELS = LazyTable(
    "architecture",
    {
        **{name: f"quire.models.{family.model}" for name, family in FAMILIES.items()},
        "TransformersForCausalLM": "quire.models.transformers_backend:TransformersModel",
        "TransformersWithOwnCache": "quire.models.transformers_own_cache:OwnCacheModel",
    },
)
"""Model classes by architecture name, as in `architectures` of config.json."""
CLASSIFIERS = LazyTable(
    "classifier",
    {
        **dict.fromkeys(("BertModel", "ErnieModel"), "quire.models.heads:BertClassifier"),
        **dict.fromkeys(("GteModel", "NomicBertModel"), "quire.models.heads:BertClassifier"),
        "DistilBertModel": "quire.models.heads:DistilBertClassifier",
        **dict.fromkeys(("JinaEmbeddingsV3Model", "MPNetModel"), "quire.models.heads:RobertaClassifier"),
        "RobertaModel": "quire.models.heads:RobertaClassifier",
        "XLMRobertaModel": "quire.models.heads:RobertaClassifier",
        "ModernBertModel": "quire.models.modernbert:ModernBertClassifier",
    },
)
"""Sequence classifier heads by the architecture of the encoder, for heads of more than one projection."""
TOKEN_CLASSIFIERS = LazyTable(
    "classifier of tokens",
    {
        **dict.fromkeys(("BertModel", "GteModel", "NomicBertModel"), "quire.models.heads:TokenClassifier"),
        **dict.fromkeys(("RobertaModel", "XLMRobertaModel"), "quire.models.heads:TokenClassifier"),
        **dict.fromkeys(("DistilBertModel", "ErnieModel"), "quire.models.heads:TokenClassifier"),
        **dict.fromkeys(("JinaEmbeddingsV3Model", "MPNetModel"), "quire.models.heads:TokenClassifier"),
        "ModernBertModel": "quire.models.modernbert:ModernBertClassifier",
    },
)
"""Token classifier heads by the architecture of the encoder."""
DRAFTS = LazyTable(
    "draft",
    {
        "Eagle3LlamaForCausalLM": "quire.models.drafts:Eagle3",
        "EagleLlamaForCausalLM": "quire.models.drafts:Eagle",
        "MTP": "quire.models.drafts:MTP",
    },
)
"""Classes of draft models that read the hidden states of a target model, by the draft's architecture."""
