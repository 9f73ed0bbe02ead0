use folio_formats::gguf::Writer;

use super::*;

fn scratch(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("folio-generation-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// The forms in which families publish generation_config.json.
#[test]
fn published_files_are_read_whole() {
    type Numbers = [Option<f32>; 4];
    let check = |json: &str, ends: &[u32], numbers: Numbers, top_k: Option<u32>, most: Option<usize>, ignored: &str| {
        let read = Generation::parse(json).unwrap_or_else(|error| panic!("{json}: {error:#}"));
        let SamplingDefaults { temperature, top_p, min_p, repetition_penalty, .. } = read.sampling;
        assert_eq!(read.ends, ends, "{json}");
        assert_eq!([temperature, top_p, min_p, repetition_penalty], numbers, "{json}");
        assert_eq!((read.sampling.top_k, read.sampling.max_tokens), (top_k, most), "{json}");
        assert_eq!(read.ignored.join(", "), ignored, "{json}");
    };
    let none = [None; 4];
    check("{}", &[], none, None, None, "");
    // Qwen 2.5.
    check(
        r#"{"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
            "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"}"#,
        &[151_645, 151_643],
        [Some(0.7), Some(0.8), None, Some(1.05)],
        Some(20),
        None,
        "",
    );
    // Qwen 1, with fields of its own.
    check(
        r#"{"chat_format": "chatml", "eos_token_id": 151643, "max_new_tokens": 512, "max_window_size": 6144, "top_k": 0}"#,
        &[151_643],
        none,
        None,
        Some(512),
        "",
    );
    // Llama 2 and 3.
    check(
        r#"{"eos_token_id": 2, "max_length": 4096, "temperature": 0.6, "top_p": 0.9}"#,
        &[2],
        [Some(0.6), Some(0.9), None, None],
        None,
        None,
        "max_length 4096",
    );
    // Phi-3, and what is as good as nothing.
    check(
        r#"{"_from_model_config": true, "eos_token_id": [32000, 32001, 32007], "num_beams": 1, "typical_p": 1.0,
            "suppress_tokens": null, "bad_words_ids": [], "remove_invalid_values": false, "temperature": null}"#,
        &[32_000, 32_001, 32_007],
        none,
        None,
        None,
        "",
    );
    // No end at all.
    check(r#"{"eos_token_id": null}"#, &[], none, None, None, "");
    check(r#"{"eos_token_id": -1, "top_k": -1, "min_p": 0.05}"#, &[], [None, None, Some(0.05), None], None, None, "");
    // Settings that are not supported.
    check(
        r#"{"do_sample": false, "typical_p": 0.9, "no_repeat_ngram_size": 3, "suppress_tokens": [1, 2]}"#,
        &[],
        none,
        None,
        None,
        "do_sample false, typical_p 0.9, no_repeat_ngram_size 3, suppress_tokens [1,2]",
    );
    check(r#"{"do_sample": false, "temperature": 0}"#, &[], [Some(0.0), None, None, None], None, None, "");
}

#[test]
fn wrong_fields_are_named() {
    let check = |json: &str, expect: &str| {
        let error = format!("{:#}", Generation::parse(json).expect_err(json));
        assert!(error.contains(expect), "{error}");
    };
    check(r#"{"eos_token_id": "</s>"}"#, "eos_token_id: expected token ids, found \"</s>\"");
    check(r#"{"temperature": "hot"}"#, "temperature: expected a number, found \"hot\"");
    check(r#"{"max_new_tokens": 1.5}"#, "max_new_tokens: expected a whole number, found 1.5");
    check("[]", "map");
}

#[test]
fn a_folder_says_it_in_two_files() {
    let folder = scratch("folder");
    let check = |config: &str, own: Option<&str>, ends: &[u32], temperature: Option<f32>| {
        std::fs::write(folder.join("config.json"), config).expect("written");
        match own {
            Some(own) => std::fs::write(folder.join(FILE), own).expect("written"),
            None => drop(std::fs::remove_file(folder.join(FILE))),
        }
        let mut read = Generation::of_folder(&folder).expect("sound");
        read.ends.sort_unstable();
        assert_eq!((read.ends.as_slice(), read.sampling.temperature), (ends, temperature), "{config} {own:?}");
        assert!(read.ignored.is_empty(), "{config} {own:?}");
    };
    let config = r#"{"model_type": "llama", "eos_token_id": 2, "temperature": 0.5, "hidden_size": 8}"#;
    check(config, None, &[2], Some(0.5));
    check(config, Some(r#"{"eos_token_id": [3, 4], "temperature": 0.7}"#), &[2, 3, 4], Some(0.7));
    check(config, Some("{}"), &[2], None);
    check(r#"{"text_config": {"eos_token_id": [1, 106]}}"#, None, &[1, 106], None);
}

#[test]
fn gguf_metadata_says_it_under_other_names() {
    let path = scratch("gguf").join("m.gguf");
    let check = |set: &dyn Fn(&mut Writer<'_>), sampling: SamplingDefaults, ignored: &str| {
        let mut writer = Writer::new();
        set(writer.set("general.architecture", "llama"));
        std::fs::write(&path, writer.to_vec()).expect("written");
        let read = Generation::of_gguf(&Gguf::open(&path).expect("sound")).expect("sound");
        assert_eq!((read.sampling, read.ignored.join(", ").as_str()), (sampling, ignored));
    };
    let nothing = SamplingDefaults::default();
    check(&|_| (), nothing, "");
    let set = |writer: &mut Writer<'_>| {
        writer.set("general.sampling.temp", 0.5f32).set("general.sampling.top_k", 20u32);
        writer.set("general.sampling.top_p", 0.75f32).set("general.sampling.min_p", 0.25f32);
        writer.set("general.sampling.penalty_repeat", 1.5f32).set("general.sampling.mirostat", 0u32);
    };
    let all = SamplingDefaults {
        temperature: Some(0.5),
        top_k: Some(20),
        top_p: Some(0.75),
        min_p: Some(0.25),
        repetition_penalty: Some(1.5),
        ..nothing
    };
    check(&set, all, "");
    let set = |writer: &mut Writer<'_>| {
        writer.set("general.sampling.sequence", "k;p").set("general.sampling.mirostat", 2u32);
        writer.set("general.sampling.mirostat_tau", 5.0f32).set("general.sampling.penalty_last_n", 64u32);
    };
    let ignored = "general.sampling.sequence, general.sampling.mirostat 2, general.sampling.penalty_last_n 64";
    check(&set, nothing, ignored);
    let set = |writer: &mut Writer<'_>| {
        writer.set("folio.generation_config", r#"{"temperature": 0.7, "max_new_tokens": 9, "typical_p": 0.5}"#);
        writer.set("general.sampling.temp", 0.25f32);
    };
    let both = SamplingDefaults { temperature: Some(0.25), max_tokens: Some(9), ..nothing };
    check(&set, both, "typical_p 0.5");
}

#[test]
fn flags_choose_as_vllms_do() {
    let folder = scratch("flags");
    std::fs::write(folder.join(FILE), r#"{"temperature": 0.25, "max_new_tokens": 5, "eos_token_id": 9}"#)
        .expect("written");
    let own = Generation::parse(r#"{"temperature": 0.75, "min_p": 0.5, "max_new_tokens": 7, "eos_token_id": 2}"#);
    let own = own.expect("sound");
    let check =
        |source: &str, above: Option<&str>, ends: &[u32], expect: (Option<f32>, Option<f32>), lengths: (_, _)| {
            let options = GenerationOptions {
                source: source.parse().expect("a source"),
                overrides: above.map(|json| overrides(json).expect("sound")),
            };
            let chosen = choose(&own, &options).expect("sound");
            let SamplingDefaults { temperature, min_p, max_tokens, most_tokens, .. } = chosen.sampling;
            assert_eq!(chosen.ends, ends, "{source} {above:?}");
            assert_eq!(((temperature, min_p), (max_tokens, most_tokens)), (expect, lengths), "{source} {above:?}");
        };
    let folder = folder.to_str().expect("UTF-8");
    check("auto", None, &[2], (Some(0.75), Some(0.5)), (Some(7), None));
    check("vllm", None, &[2], (None, None), (None, None));
    check(folder, None, &[9, 2], (Some(0.25), None), (Some(5), Some(5)));
    check("auto", Some(r#"{"temperature": 0}"#), &[2], (Some(0.0), Some(0.5)), (Some(7), None));
    check("auto", Some(r#"{"max_new_tokens": 3}"#), &[2], (Some(0.75), Some(0.5)), (Some(3), Some(3)));
    check("vllm", Some(r#"{"min_p": 0.125}"#), &[2], (None, Some(0.125)), (None, None));
    check(folder, Some(r#"{"max_new_tokens": 3}"#), &[9, 2], (Some(0.25), None), (Some(3), Some(3)));
    let refused = |json: &str, expect: &str| {
        let error = format!("{:#}", overrides(json).expect_err(json));
        assert!(error.contains(expect), "{error}");
    };
    refused(r#"{"typical_p": 0.5}"#, "typical_p: not one of temperature");
    refused("0.5", "expected a JSON object");
    let wrong = Generation::parse(r#"{"top_p": 2}"#).expect("numbers");
    let error = choose(&wrong, &GenerationOptions::default()).expect_err("out of range").to_string();
    assert!(error.contains("top_p is 2, but must be above 0") && error.contains("--generation-config"), "{error}");
}

#[test]
fn the_note_leaves_out_limits_that_the_context_keeps() {
    let read = Generation::parse(r#"{"max_length": 4096, "typical_p": 0.5}"#).expect("sound");
    let check = |context, expect: &str| {
        assert_eq!(read.note(context).as_deref().map(|note| &note[note.len() - expect.len()..]), Some(expect))
    };
    check(4096, "here: typical_p 0.5");
    check(8192, "here: max_length 4096, typical_p 0.5");
    assert_eq!(Generation::default().note(1), None);
}
