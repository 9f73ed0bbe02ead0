"""Reads configs.json, the essential settings of published models, and writes facts.json: what transformers makes of
each. Run it with the transformers version that the goldens were made with; no weights are needed."""

import importlib
import json
import logging
from pathlib import Path

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

logging.disable(logging.CRITICAL)
HERE = Path(__file__).parent


def ropes(config):
    """[rotated pairs, first frequency, last frequency, magnitude] of each encoding, full layers first."""
    if (config.rope_parameters or {}).get("rope_type") == "longrope":
        length = config.max_position_embeddings
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        return [[len(frequencies), float(frequencies[0]), float(frequencies[-1]), magnitude]]
    modeling = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    rotary = next(getattr(modeling, name) for name in dir(modeling) if name.endswith("RotaryEmbedding"))(config)
    found = []
    for prefix in ["", "full_attention_", "sliding_attention_"]:
        frequencies = getattr(rotary, prefix + "inv_freq", None)
        if frequencies is not None:
            magnitude = getattr(rotary, prefix + "attention_scaling")
            found.append([len(frequencies), float(frequencies[0]), float(frequencies[-1]), magnitude])
    return found


def context(config):
    """Yarn lengthens the context that it starts from, as vLLM has it; the field states that one or the longer one."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "yarn":
        return config.max_position_embeddings
    return max(config.max_position_embeddings, round(rope["original_max_position_embeddings"] * rope["factor"]))


def facts(settings):
    settings = {key: value for key, value in settings.items() if key != "quantization_config"}
    whole = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    config = whole.get_text_config()
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "context": context(config),
        "vocab": config.vocab_size,
        "eps": config.rms_norm_eps,
        "tied": whole.tie_word_embeddings,
        "windows": [window if kind == "sliding_attention" else 0 for kind in types],
        "ropes": ropes(config),
    }


configs = json.loads((HERE / "configs.json").read_text())
rows = [f"  {json.dumps(name)}: {json.dumps(facts(settings))}" for name, settings in configs.items()]
header = f'  "made_with": "transformers {transformers.__version__}"'
(HERE / "facts.json").write_text("{\n" + ",\n".join([header, *rows]) + "\n}\n")
