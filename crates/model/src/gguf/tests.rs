//! Metadata as converters write it, with its consequences; and files with missing or changed keys.

use folio_formats::gguf::Writer;
use folio_formats::{Format, Mapped};

use super::*;
use crate::FfnSpec;

type Spoil = fn(&mut Writer<'_>);

/// A minimal file with the required keys and its embedding.
fn file(architecture: &str, fill: impl FnOnce(&mut Writer<'_>)) -> Gguf {
    let mut writer = Writer::new();
    writer.set("general.architecture", architecture);
    for (key, value) in [
        ("embedding_length", 64u32),
        ("block_count", 6),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("feed_forward_length", 96),
        ("context_length", 512),
    ] {
        writer.set(&format!("{architecture}.{key}"), value);
    }
    writer.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-5f32);
    writer.tensor("token_embd.weight", Format::F32, &[10, 64], vec![0u8; 2560]);
    fill(&mut writer);
    Gguf::from_map(Mapped::from_vec("model.gguf", writer.to_vec())).unwrap()
}

fn check(architecture: &str, fill: impl FnOnce(&mut Writer<'_>), holds: impl Fn(&ModelSpec, &Names) -> bool) {
    let (spec, names) =
        describe(&file(architecture, fill), &Wanted::default()).unwrap_or_else(|e| panic!("{architecture}: {e}"));
    assert!(holds(&spec, &names), "{architecture}\n{names:?}\n{spec:#?}");
}

fn windows(spec: &ModelSpec) -> Vec<usize> {
    spec.layers.iter().map(|layer| layer.attention.window.unwrap_or(0)).collect()
}

#[test]
fn every_architecture_has_a_spec() {
    for family in FAMILIES {
        let Some(architecture) = family.gguf else { continue };
        let permuted = matches!(architecture, "llama" | "granite" | "smollm3");
        check(
            architecture,
            |_| {},
            |spec, names| {
                (spec.vocab_size, spec.hidden, spec.layers.len(), spec.norm_offset) == (10, 64, 6, 0.0)
                    && spec.tied_head
                    && *names == Names::Gguf { permuted }
            },
        );
    }
}

#[test]
fn one_architecture_may_be_several_families() {
    check("llama", |_| {}, |spec, _| spec.family == "llama");
    let experts = |writer: &mut Writer<'_>| {
        writer.set("llama.expert_count", 8u32).set("llama.expert_used_count", 2u32);
    };
    check("llama", experts, |spec, _| spec.family == "mixtral" && windows(spec) == [0; 6]);
    let window = |writer: &mut Writer<'_>| {
        writer.set("llama.attention.sliding_window", 32u32);
    };
    check("llama", window, |spec, _| spec.family == "mistral" && windows(spec) == [32; 6]);
    let olmo3 = |writer: &mut Writer<'_>| {
        writer.set("olmo2.attention.sliding_window", 32u32);
        writer.set("olmo2.attention.sliding_window_pattern", vec![true, false, true, false, true, true]);
    };
    check("olmo2", olmo3, |spec, _| windows(spec) == [32, 0, 32, 0, 32, 32]);
    let as_numbers = |writer: &mut Writer<'_>| {
        writer.set("gpt-oss.attention.sliding_window", 32u32);
        writer.set("gpt-oss.attention.sliding_window_pattern", vec![0u32, 1, 1, 0, 0, 1]);
    };
    check("gpt-oss", as_numbers, |spec, _| windows(spec) == [0, 32, 32, 0, 0, 32]);
}

#[test]
fn position_encodings() {
    check(
        "llama",
        |w| {
            w.set("llama.rope.freq_base", 500_000f32);
        },
        |spec, _| (spec.ropes[0].inv_freq[1] - 500_000f32.powf(-0.125)).abs() < 1e-6,
    );
    let factors: Vec<u8> = [1f32, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0].iter().flat_map(|f| f.to_le_bytes()).collect();
    check(
        "llama",
        |w| {
            w.tensor("rope_freqs.weight", Format::F32, &[8], factors.clone());
        },
        |spec, _| {
            let frequencies = &spec.ropes[0].inv_freq;
            frequencies[0] == 1.0 && (frequencies[7] - 10_000f32.powf(-0.875) / 8.0).abs() < 1e-9
        },
    );
    let linear = |writer: &mut Writer<'_>| {
        writer.set("gemma3.rope.scaling.type", "linear").set("gemma3.rope.scaling.factor", 8f32);
        writer.set("gemma3.rope.freq_base", 1e6f32).set("gemma3.attention.sliding_window", 16u32);
    };
    check("gemma3", linear, |spec, _| {
        (spec.ropes[0].inv_freq[0], spec.ropes[1].inv_freq[0]) == (0.125, 1.0)
            && windows(spec) == [16, 16, 16, 16, 16, 0]
    });
    check(
        "phi3",
        |w| {
            w.set("phi3.rope.dimension_count", 12u32);
        },
        |spec, _| spec.ropes[0].inv_freq.len() == 6,
    );
    check(
        "phi3",
        |w| {
            w.set("phi3.attention.key_length", 44u32).set("phi3.rope.dimension_count", 30u32);
        },
        |spec, _| spec.ropes[0].inv_freq.len() == 15,
    );
}

#[test]
fn what_the_architecture_takes_for_granted() {
    check(
        "qwen3moe",
        |w| {
            w.set("qwen3moe.expert_count", 8u32);
        },
        |spec, _| spec.layers.iter().all(|l| matches!(&l.ffn, FfnSpec::Experts(e) if e.normalize && e.experts == 8)),
    );
    check(
        "gemma2",
        |w| {
            w.set("gemma2.attention.key_length", 256u32);
        },
        |spec, _| spec.layers[0].attention.scale == 0.0625 && windows(spec) == [4096, 0, 4096, 0, 4096, 0],
    );
    check(
        "granite",
        |w| {
            w.set("granite.logit_scale", 8f32).set("granite.attention.scale", 0.5f32);
        },
        |spec, _| spec.logit_scale == 0.125 && spec.layers[0].attention.scale == 0.5,
    );
}

#[test]
fn a_bad_key_is_named_as_the_file_has_it() {
    let rows: [(&str, Spoil, &str); 9] = [
        ("mamba", |_| {}, "general.architecture"),
        (
            "llama",
            |w| {
                w.set("llama.attention.key_length", 15u32);
            },
            "llama.attention.key_length",
        ),
        (
            "llama",
            |w| {
                w.set("llama.rope.scaling.type", "spiral");
            },
            "llama.rope.scaling.type",
        ),
        (
            "llama",
            |w| {
                w.set("llama.expert_count", vec![1u32, 2]);
            },
            "llama.expert_count",
        ),
        (
            "llama",
            |w| {
                w.set("llama.rope.freq_base", f32::NAN);
            },
            "llama.rope.freq_base",
        ),
        (
            "llama",
            |w| {
                w.set("llama.attention.sliding_window", u64::MAX);
            },
            "llama.attention.sliding_window",
        ),
        (
            "llama",
            |w| {
                w.tensor("rope_freqs.weight", Format::F32, &[1 << 16], vec![0; 1 << 18]);
            },
            "rope_freqs.weight",
        ),
        (
            "llama",
            |w| {
                w.set("llama.attention.value_length", 8u32).set("llama.attention.key_length", 16u32);
            },
            "value_length",
        ),
        (
            "gpt-oss",
            |w| {
                w.set("gpt-oss.expert_count", 2u32).set("gpt-oss.expert_used_count", 3u32);
            },
            "gpt-oss.expert_used_count",
        ),
    ];
    for (architecture, spoil, key) in rows {
        let error = describe(&file(architecture, spoil), &Wanted::default()).unwrap_err().to_string();
        assert!(error.contains("model.gguf") && error.contains(key), "{key}: {error}");
    }
}

/// A file with a tensor of the stored type Q8_1, which is not read and takes no more bytes than
/// f32.
fn with_unread(name: &str, shape: &[usize]) -> Gguf {
    let mut writer = Writer::new();
    let written = file("llama", |_| {});
    for (key, value) in written.metadata().pairs() {
        writer.set(key, value.clone());
    }
    let zeros = |shape: &[usize]| vec![0u8; 4 * shape.iter().product::<usize>()];
    if name != "token_embd.weight" {
        writer.tensor("token_embd.weight", Format::F32, &[10, 64], zeros(&[10, 64]));
    }
    writer.tensor(name, Format::F32, shape, zeros(shape));
    let mut bytes = writer.to_vec();
    let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).expect("its name");
    // The name is followed by the number of dimensions, the dimensions, and the type.
    let kind = at + name.len() + 4 + 8 * shape.len();
    assert_eq!(bytes[kind..kind + 4], [0; 4], "f32");
    bytes[kind] = 9;
    Gguf::from_map(Mapped::from_vec("model.gguf", bytes)).unwrap()
}

#[test]
fn a_tensor_of_a_type_that_is_not_read_is_not_missing() {
    for (name, shape) in [("token_embd.weight", &[10, 64][..]), ("rope_freqs.weight", &[32])] {
        let error = describe(&with_unread(name, shape), &Wanted::default()).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor {name} is stored as Q8_1")), "{error}");
    }
    let spec = |name, shape| describe(&with_unread(name, shape), &Wanted::default()).unwrap().0;
    // The model has it; the error comes when it is loaded.
    assert!(!spec("output.weight", &[10, 64]).tied_head);
    assert!(spec("blk.0.attn_q.bias", &[64]).layers[0].attention.qkv_bias);
}

#[test]
fn a_file_states_its_whole_context_and_may_be_asked_for_more() {
    let yarn = |writer: &mut Writer<'_>| {
        writer.set("qwen3.rope.scaling.type", "yarn").set("qwen3.rope.scaling.factor", 4f32);
        writer.set("qwen3.rope.scaling.original_context_length", 400u32);
    };
    let context = |wanted: Wanted| describe(&file("qwen3", yarn), &wanted).map(|(spec, _)| spec.max_context);
    assert_eq!(context(Wanted::default()).unwrap(), 512);
    assert_eq!(context(Some(1600).into()).unwrap(), 1600);
    assert!(context(Some(1601).into()).is_err());
    let scaling = json!({"rope_type": "linear", "factor": 4.0}).as_object().cloned();
    let overrides = crate::Overrides::new(Map::new(), scaling);
    assert_eq!(context(Wanted { max_context: None, overrides }).unwrap(), 2048);
}
