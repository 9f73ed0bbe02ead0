//! Heads beside a trained model: whatever they draft, answers are those without them.

use std::collections::BTreeMap;

use folio_engine::speculate::{EagleDrafter, EagleOptions, MedusaDrafter, MedusaOptions};
use folio_model::{
    Decoder,
    device::cpu::Cpu,
    formats::{Format, TensorView, WeightSource},
};

use crate::trained::{Make, Tokens, answer, requests, root};

const PROMPTS: usize = 60;

/// Tensors of a few numbers that are not zero.
#[derive(Clone, Default)]
struct Sparse(BTreeMap<String, (Vec<usize>, Vec<u8>)>);

impl Sparse {
    fn put(mut self, name: &str, shape: &[usize], value: impl Fn(usize, usize) -> f32) -> Self {
        let (rows, cols) = (shape[0], shape.get(1).copied().unwrap_or(1));
        let values = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
        let bytes = values.flat_map(|(row, col)| value(row, col).to_le_bytes()).collect();
        self.0.insert(name.to_owned(), (shape.to_vec(), bytes));
        self
    }
}

impl WeightSource for Sparse {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, (shape, bytes)) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: Format::F32, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

/// Heads that leave the state as it is: they say again what the model says, which is right now and then.
fn medusa(hidden: usize) -> Sparse {
    (0..3).fold(Sparse::default(), |weights, head| {
        let stem = format!("medusa_head.{head}.0.linear");
        weights.put(&format!("{stem}.weight"), &[hidden, hidden], |_, _| 0.0).put(
            &format!("{stem}.bias"),
            &[hidden],
            |_, _| 0.0,
        )
    })
}

/// A layer that attends, but for a part of the state that goes around it.
fn eagle(hidden: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Sparse {
    let wave = |row: usize, col: usize| 0.1 * (((row * 37 + col * 101) % 199) as f32 / 99.0 - 1.0);
    let layer = |name: &str| format!("layers.0.{name}.weight");
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    Sparse::default()
        .put("fc.weight", &[hidden, 2 * hidden], |row, col| if col == hidden + row { 1.0 } else { 0.0 })
        .put(&layer("self_attn.q_proj"), &[q, hidden], wave)
        .put(&layer("self_attn.k_proj"), &[kv, hidden], wave)
        .put(&layer("self_attn.v_proj"), &[kv, hidden], wave)
        .put(&layer("self_attn.o_proj"), &[hidden, q], wave)
        .put(&layer("mlp.gate_proj"), &[64, hidden], wave)
        .put(&layer("mlp.up_proj"), &[64, hidden], wave)
        .put(&layer("mlp.down_proj"), &[hidden, 64], wave)
        .put(&layer("post_attention_layernorm"), &[hidden], |_, _| 1.0)
}

#[test]
fn answers_do_not_change() {
    let mut requests = requests(&Tokens::read());
    requests.truncate(PROMPTS);
    let model = folio_model::open(&root().join("models/folio-rust-7m.gguf")).expect("a sound model");
    let (expected, _) = answer(&model, &requests, false, None);
    let attention = model.spec.layers[0].attention.clone();
    let hidden = model.spec.hidden;
    let head = eagle(hidden, attention.heads, attention.kv_heads, attention.head_dim);
    let wide = EagleOptions { least: 0.0, least_expanded: 0.0, ..EagleOptions::default() };
    let with_eagle = |options: EagleOptions| -> Make {
        let head = head.clone();
        Box::new(move |decoder: &mut Decoder<Cpu>| {
            Box::new(EagleDrafter::load(decoder, &head, options).expect("a head"))
        })
    };
    let with_medusa: Make = Box::new(move |decoder: &mut Decoder<Cpu>| {
        Box::new(MedusaDrafter::load(decoder, &medusa(hidden), MedusaOptions::default()).expect("heads"))
    });
    let methods: [(&str, Make, usize); 4] = [
        ("Medusa", with_medusa, 9),
        ("EAGLE", with_eagle(EagleOptions::default()), 6),
        ("a chain of EAGLE", with_eagle(EagleOptions { candidates: 1, width: 1, ..wide }), 4),
        ("a tree of EAGLE", with_eagle(wide), 14),
    ];
    for (name, make, most) in methods {
        let (found, stats) = answer(&model, &requests, true, Some((make, most)));
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "prompt {index}, {name}");
        }
        let drafts = &stats.speculation;
        assert!(drafts.drafts > 100 && stats.scheduler.preemptions > 0, "{name}: {drafts:?}");
        assert!(drafts.accepted_tokens > 0, "{name}: {drafts:?}");
    }
}
