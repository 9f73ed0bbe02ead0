//! Plans against what a decoder really takes once it is loaded.

mod gpu;
mod invent;

use folio_device::cpu::{Cpu, CpuConfig, Packed, PackedParts};
use folio_model::{AtLoad, Decoder};

use folio_engine::RequestId;
use folio_engine::speculate::{Known, Owner, Propose, Suffix};

use super::*;
use crate::drafting::{Drafting, OpenedMethod, suffix_options};
use crate::options::MemoryBudget;
use invent::{Stored, invent};

const MIB: u64 = 1 << 20;

/// Default options but for a few.
fn options(change: impl FnOnce(&mut Options)) -> Options {
    let mut options = Options::default();
    change(&mut options);
    options
}

/// Three sequences in small steps, with a KV cache of 1 MiB.
fn small() -> Options {
    few(MemoryBudget::KvCache { bytes: MIB, setting: "--kv-cache-mib" })
}

/// Three sequences in small steps.
fn few(budget: MemoryBudget) -> Options {
    options(|options| {
        (options.max_num_seqs, options.max_num_batched_tokens) = (Some(3), Some(24));
        options.memory.budget = budget;
    })
}

fn kv_bytes(bytes: u64) -> MemoryBudget {
    MemoryBudget::KvCache { bytes, setting: "--kv-cache-memory-bytes" }
}

fn plan(assets: &Assets, options: &Options) -> Result<Plan> {
    Plan::new(assets, None, options, &Target::Cpu(CpuConfig { threads: 2, isa: None }))
}

fn refusal(assets: &Assets, options: &Options) -> String {
    plan(assets, options).map(|plan| plan.bytes).expect_err("it is refused").to_string()
}

/// The plan's figures are those of the decoder, byte for byte.
fn check(assets: &Assets, options: &Options) {
    let plan = plan(assets, options).unwrap_or_else(|error| panic!("{}: {error:#}", assets.name));
    let parts = PackedParts::default();
    let cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).expect("a cpu").with_packed(&Packed::Shared(parts.clone()));
    let decoder = Decoder::load(cpu, &assets.model, plan.limits(), &mut |_| {}).expect("it loads");
    assert_eq!(plan.parts, parts.shapes(), "{}: parts in the order in which they are packed", assets.name);
    let memory = decoder.memory();
    let planned = (plan.bytes.weights, plan.bytes.activations, plan.bytes.kv);
    assert_eq!(planned, (memory.weights, memory.activations, memory.kv), "{}", assets.name);
    let blocks: u64 = plan.groups.iter().map(|group| group.block_bytes).sum();
    let per_token = assets.model.spec.kv_bytes_per_token(plan.kv_format);
    assert_eq!(blocks, per_token * BLOCK_TOKENS as u64, "{}: bytes of a block and of a token", assets.name);
}

fn llama(extra: &str) -> String {
    format!(
        r#"{{"model_type": "llama", "vocab_size": 50, "hidden_size": 96, "intermediate_size": 72,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5 {extra}}}"#
    )
}

fn with_windows() -> String {
    llama(r#", "sliding_window": 32, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh""#)
        .replace("llama", "gemma2")
}

#[test]
fn figures_are_those_of_the_loaded_decoder() {
    let experts = r#", "num_local_experts": 5, "num_experts_per_tok": 2"#;
    let moe = r#", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": true"#;
    let models = [
        ("tied", llama(r#", "tie_word_embeddings": true"#)),
        ("untied with biases", llama(r#", "tie_word_embeddings": false, "attention_bias": true, "mlp_bias": true"#)),
        ("windows and four norms", with_windows()),
        ("mixtral", llama(experts).replace("llama", "mixtral")),
        ("qwen3_moe", llama(moe).replace("llama", "qwen3_moe")),
    ];
    for (name, config) in models {
        for stored in [Stored::F32, Stored::F16, Stored::BF16, Stored::Mixed] {
            check(&invent(&format!("{name}, {stored:?}"), &config, stored), &small());
        }
    }
}

#[test]
fn tables_and_experts_are_counted_apart() {
    let cpu = Target::Cpu(CpuConfig { threads: 1, isa: None });
    let count =
        |config: &str, stored| WeightBytes::of(&invent("apart", config, stored).model, &cpu).expect("it counts");
    for stored in [Stored::F32, Stored::BF16, Stored::Mixed] {
        let [tied, untied] =
            [true, false].map(|tied| count(&llama(&format!(r#", "tie_word_embeddings": {tied}"#)), stored));
        assert!(untied.table > 0 && untied.experts == 0, "{stored:?}: {untied:?}");
        assert_eq!(untied.table, tied.table, "{stored:?}");
        let moe = |experts: usize| {
            let more = format!(r#", "num_experts": {experts}, "num_experts_per_tok": 2, "moe_intermediate_size": 40"#);
            count(&llama(&more).replace("llama", "qwen3_moe"), stored)
        };
        let (few, many) = (moe(4), moe(8));
        assert_eq!(many.experts, 2 * few.experts, "{stored:?}");
        assert!(many.matrices > many.experts + many.table, "{stored:?}: {many:?}");
    }
}

#[test]
fn figures_in_every_format_of_keys_and_values() {
    for (name, config) in [("one group", llama("")), ("two groups", with_windows())] {
        let assets = invent(name, &config, Stored::BF16);
        for format in KvFormat::ALL {
            let mut options = small();
            options.memory.kv_format = Some(format);
            check(&assets, &options);
            let plan = plan(&assets, &options).expect("it fits");
            assert_eq!(plan.kv_format, format);
            // A head of 24 values.
            let head = match format {
                KvFormat::F32 => 96,
                KvFormat::F16 | KvFormat::BF16 => 48,
                KvFormat::Fp8 | KvFormat::Int8 => 24 + 4,
                KvFormat::Int4 => 16 + 4,
            };
            let layers: usize = plan.groups.iter().map(|group| group.layers).sum();
            assert_eq!(assets.model.spec.kv_bytes_per_token(format), 2 * 2 * head * layers as u64);
        }
        assert_eq!(plan(&assets, &small()).expect("it fits").kv_format, KvFormat::BF16, "as the weights");
    }
}

#[test]
fn figures_of_weights_that_are_encoded_while_they_are_loaded() {
    let moe = r#", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true"#;
    for config in [llama(""), llama(moe).replace("llama", "qwen3_moe")] {
        for (name, kind) in AtLoad::ALL {
            let mut assets = invent(name, &config, Stored::BF16);
            let plain = plan(&assets, &small()).expect("it fits").bytes.weights;
            assets.quantize(Some(kind)).expect("its weights are plain");
            check(&assets, &small());
            let encoded = plan(&assets, &small()).expect("it fits").bytes.weights;
            // Rows shorter than a group of 128 stay as they are.
            assert_eq!(encoded < plain, kind != AtLoad::Int4G128, "{name}: {encoded} bytes for {plain}");
        }
    }
}

#[test]
fn what_is_quantized_is_not_quantized_again() {
    let Ok(mut assets) = Assets::open(None, &Options::default()) else {
        eprintln!("skipped: this build has no built-in model");
        return;
    };
    let error = assets.quantize(Some(AtLoad::Int8)).expect_err("its weights are blocks").to_string();
    assert!(error.contains("quantized already"), "{error}");
    assets.quantize(None).expect("nothing is asked for");
}

#[test]
fn figures_of_the_built_in_model() {
    let Ok(assets) = Assets::open(None, &Options::default()) else {
        eprintln!("skipped: this build has no built-in model");
        return;
    };
    check(&assets, &options(|options| options.memory.budget = kv_bytes(64 * MIB)));
    let tiered = options(|options| {
        options.memory.budget = MemoryBudget::Total(400 * MIB);
        options.memory.host_tier_bytes = Some(16 * MIB);
    });
    check(&assets, &tiered);
}

#[test]
fn a_budget_is_kept_and_nearly_used_up() {
    let assets = invent("small", &llama(""), Stored::BF16);
    let block = plan(&assets, &small()).expect("it fits").groups[0].block_bytes;
    for budget in [19_000_000, 20_000_000, 50_000_000, 300_000_000u64] {
        let plan = plan(&assets, &few(MemoryBudget::Total(budget))).expect("it fits");
        assert!(plan.bytes.total() <= budget, "{:?}", plan.bytes);
        assert!(plan.bytes.total() + block > budget, "{budget} is not used up: {:?}", plan.bytes);
    }
    let polite = plan(&assets, &options(|options| options.max_num_seqs = Some(3))).expect("it fits");
    assert_eq!(polite.groups[0].blocks, 3 * 17, "what three requests of full length use, and no more");
    let mut tiered = small();
    tiered.memory.host_tier_bytes = Some(2 * MIB);
    let host = plan(&assets, &tiered).expect("it fits");
    assert_eq!(host.groups[0].host_slots as u64, (2 << 20) / block);
    assert_eq!(host.bytes.host, (2 << 20) / block * block);
    assert_eq!(host.bytes.total() - host.bytes.host, plan(&assets, &small()).expect("it fits").bytes.total());
}

/// Requests with more tokens than there are blocks for, since they share prompts, and past answers
/// without end.
#[test]
fn what_suffixes_hold_stays_within_their_line() {
    for config in [llama(""), with_windows()] {
        let assets = invent("suffixes", &config, Stored::BF16);
        let options = few(MemoryBudget::Total(120 * MIB));
        assert_eq!(plan(&assets, &options).expect("it fits").bytes.drafting, 0);
        let drafting = Drafting { method: OpenedMethod::Suffix, tokens: None, fixed: false };
        let cpu = Target::Cpu(CpuConfig { threads: 2, isa: None });
        let plan = Plan::new(&assets, Some(&drafting), &options, &cpu).expect("it fits");
        assert!(plan.bytes.total() <= 120 << 20 && plan.to_text("small").contains("guessing ahead"));

        let mut method = Suffix::new(suffix_options(&assets.model.spec, &plan.limits()));
        let mut state = 7u64;
        let mut text = |len: usize| -> Vec<u32> {
            let next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as u32 % 40
            };
            std::iter::repeat_with(next).take(len).collect()
        };
        let prompt = text(plan.kv_tokens() / 5);
        for request in 0..9 {
            let owner = Owner { tenant: request % 3, salt: request % 3 };
            let tokens = [&prompt[..], &text(50)].concat();
            method.observe(Known { id: RequestId(request), owner, tokens: &tokens });
        }
        for answer in 0..1500 {
            method.learn(Owner { tenant: answer % 3, salt: answer % 40 }, &text(300));
        }
        let held = (method.shared_bytes() + method.request_bytes()) as u64;
        assert!(held <= plan.bytes.drafting, "{held} bytes of {} that are planned", plan.bytes.drafting);
        assert!(held > plan.bytes.drafting / 4, "{held} bytes of {}: the rest is never used", plan.bytes.drafting);
    }
}

#[test]
fn windows_take_fewer_blocks() {
    let assets = invent("windows", &with_windows(), Stored::BF16);
    let mut options = few(MemoryBudget::Total(40 * MIB));
    options.max_num_batched_tokens = Some(16);
    let plan = plan(&assets, &options).expect("it fits");
    let (window, full): (Vec<&GroupPlan>, Vec<&GroupPlan>) = plan.groups.iter().partition(|g| g.window.is_some());
    assert_eq!((window.len(), full.len()), (1, 1));
    assert!(window[0].blocks < 32 && full[0].blocks > 1000, "{:?}", plan.groups);
    assert_eq!(plan.concurrency.last(), Some(&(256, 3)));
    assert_eq!(plan.kv_tokens(), full[0].blocks * BLOCK_TOKENS);
}

#[test]
fn what_does_not_fit_says_what_would() {
    let assets = invent("small", &llama(""), Stored::BF16);
    let block = plan(&assets, &small()).expect("it fits").groups[0].block_bytes;
    let nine_blocks = few(kv_bytes(9 * block));
    let text = refusal(&assets, &nine_blocks);
    for part in ["256 tokens", "--kv-cache-memory-bytes", "--max-model-len 128", "--fit"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let mut fitting = nine_blocks.clone();
    fitting.memory.fit = true;
    let fitted = plan(&assets, &fitting).expect("it fits");
    assert_eq!((fitted.max_model_len, fitted.shrunk_from, fitted.groups[0].blocks), (128, Some(256), 9));
    assert!(fitted.to_text("small").starts_with("--fit: a context of 256 tokens"));
    // The length in the message fits, and one more token does not.
    let asked = |len: usize| plan(&assets, &Options { max_model_len: Some(len), ..nine_blocks.clone() });
    assert!(asked(128).is_ok() && asked(129).is_err());
    let weights = plan(&assets, &small()).expect("it fits").bytes.weights;
    let text = refusal(&assets, &options(|options| options.memory.budget = MemoryBudget::Total(weights / 2)));
    let both = [units::bytes(weights), units::bytes(weights / 2), "--memory".into(), "--quantize int4".into()];
    assert!(both.iter().all(|part| text.contains(part)), "{text}");
    let text = refusal(&assets, &options(|options| options.memory.budget = MemoryBudget::Total(MIB)));
    assert!(text.contains("--max-num-batched-tokens") && text.contains("1.0 MiB"), "{text}");
    assert!(refusal(&assets, &options(|options| options.max_model_len = Some(257))).contains("256"));
    assert!(refusal(&assets, &options(|options| options.max_model_len = Some(1))).contains("at least 2"));
}

/// The message names the parts that leave no room with their sizes, and a remedy.
#[test]
fn where_nothing_fits_all_sizes_are_told() {
    let mut assets = invent("small", &llama(""), Stored::BF16);
    let target = Target::Cpu(CpuConfig { threads: 2, isa: None });
    let told = |assets: &Assets, budget: Budget| {
        let options = few(MemoryBudget::Auto);
        let sizes = StepSizes::of(&options, &target).expect("sizes");
        let planner = Planner::new(assets, None, &options, &target, sizes, budget).expect("a planner");
        planner.context(256, false).expect_err("nothing fits").to_string()
    };
    let bytes = plan(&assets, &small()).expect("it fits").bytes;
    let (fixed, block) = (bytes.fixed(), plan(&assets, &small()).expect("it fits").groups[0].block_bytes);
    let sizes = [bytes.weights, bytes.activations].map(units::bytes);
    let has = |text: &str, parts: &[&str]| {
        for part in parts {
            assert!(text.contains(part), "{part:?} is missing: {text}");
        }
    };
    let shown = |size: u64| units::bytes(size);

    let text = told(&assets, Budget::Polite { free: bytes.weights / 2 });
    has(&text, &["does not fit", &sizes[0], &sizes[1], &shown(bytes.weights / 2), "--quantize int4", "smaller model"]);
    let text = told(&assets, Budget::Polite { free: fixed + block });
    has(&text, &["two tokens", &sizes[0], &shown(fixed + block), "half", "--memory-fraction", "--quantize int4"]);
    let text = told(&assets, Budget::All { bytes: fixed + block, flag: "--memory".into() });
    has(&text, &["two tokens", &sizes[0], "--memory", "--max-num-batched-tokens", "--quantize int4"]);
    let text = told(&assets, Budget::Kv { bytes: 5, flag: "--kv-cache-memory-bytes".into() });
    has(&text, &["two tokens", "--kv-cache-memory-bytes", &shown(2 * block)]);

    // Codes are not coded again.
    let options = options(|options| {
        options.memory.budget = MemoryBudget::Total(MIB);
        options.quantize = Some(AtLoad::Int4);
    });
    assets.quantize(options.quantize).expect("its weights are plain");
    let sizes = StepSizes::of(&options, &target).expect("sizes");
    let budget = Budget::Polite { free: 1000 };
    let planner = Planner::new(&assets, None, &options, &target, sizes, budget).expect("a planner");
    let text = planner.context(256, false).expect_err("nothing fits").to_string();
    assert!(text.contains("smaller model") && !text.contains("--quantize"), "{text}");
}

#[test]
fn fitting_a_total_counts_what_length_costs_elsewhere() {
    let assets = invent("small", &llama(""), Stored::BF16);
    let planned = |budget: u64| {
        let mut many = few(MemoryBudget::Total(budget));
        (many.max_num_seqs, many.memory.fit) = (Some(60_000), true);
        plan(&assets, &many)
    };
    // Block tables of many sequences take memory too, and more of it the longer they are.
    let whole = planned(1 << 30).expect("it fits");
    let tight = whole.bytes.total() - whole.bytes.kv + 3 * whole.groups[0].block_bytes;
    let fitted = planned(tight).expect("it fits when shorter");
    assert_eq!(whole.max_model_len, 256);
    assert!(fitted.max_model_len > 32, "shorter tables leave room for keys: {}", fitted.max_model_len);
    assert!(fitted.bytes.total() <= tight);
}
