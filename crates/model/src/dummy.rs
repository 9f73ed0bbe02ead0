//! Weights without a file: the shape of every tensor that a spec needs, for a device that generates
//! random values.
//!
//! All matrices share the same zeros, since their values are not read. Vectors are ones: norms then
//! preserve the size of their input.

use std::collections::HashMap;
use std::io;

use folio_device::NormSpan;
use folio_formats::{Format, TensorView, WeightSource};
use memmap2::MmapMut;

use crate::names::Part;
use crate::{AttentionSpec, ExpertsSpec, FfnSpec, ModelSpec, Names, NormPlacement};

pub(crate) struct DummyWeights {
    tensors: Vec<(String, Vec<usize>)>,
    by_name: HashMap<String, usize>,
    /// As long as the largest matrix, and never touched.
    zeros: MmapMut,
    /// As long as the longest vector.
    ones: Vec<u8>,
}

impl DummyWeights {
    pub fn of(spec: &ModelSpec) -> io::Result<Self> {
        let tensors = List::of(spec).tensors;
        let longest = |dimensions: usize| {
            let sizes = tensors.iter().filter(|(_, shape)| shape.len() == dimensions);
            sizes.map(|(_, shape)| 2 * shape.iter().product::<usize>()).max().unwrap_or(0)
        };
        let zeros = MmapMut::map_anon(longest(2).max(1))?;
        let ones = half::bf16::ONE.to_le_bytes().repeat(longest(1) / 2);
        let by_name = tensors.iter().enumerate().map(|(index, (name, _))| (name.clone(), index)).collect();
        Ok(Self { tensors, by_name, zeros, ones })
    }
}

impl WeightSource for DummyWeights {
    fn names(&self) -> Vec<&str> {
        self.tensors.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, shape) = &self.tensors[*self.by_name.get(name)?];
        let all: &[u8] = if shape.len() == 1 { &self.ones } else { &self.zeros };
        let bytes = &all[..2 * shape.iter().product::<usize>()];
        Some(TensorView { name, format: Format::BF16, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

/// Names and shapes in Hugging Face's layout, experts one by one.
struct List {
    names: Names,
    tensors: Vec<(String, Vec<usize>)>,
}

impl List {
    fn of(spec: &ModelSpec) -> Self {
        let names = Names::HuggingFace { prefix: "model.".into(), interleaved_experts: false };
        let mut list = Self { names, tensors: Vec::new() };
        let (hidden, outside) = (spec.hidden, (0, NormPlacement::PRE));
        list.weight(Part::Embedding, outside, vec![spec.vocab_size, hidden]);
        list.weight(Part::FinalNorm, outside, vec![hidden]);
        if !spec.tied_head {
            list.weight(Part::Head, outside, vec![spec.vocab_size, hidden]);
        }
        for (number, layer) in spec.layers.iter().enumerate() {
            let place = (number, layer.norms);
            for (wanted, part) in [
                (layer.norms.before_attention, Part::NormBeforeAttention),
                (layer.norms.after_attention, Part::NormAfterAttention),
                (layer.norms.before_ffn, Part::NormBeforeFfn),
                (layer.norms.after_ffn, Part::NormAfterFfn),
            ] {
                if wanted {
                    list.weight(part, place, vec![hidden]);
                }
            }
            list.attention(place, &layer.attention, hidden);
            match &layer.ffn {
                FfnSpec::Dense { inter, bias, .. } => {
                    list.linear(Part::Gate, place, [*inter, hidden], *bias);
                    list.linear(Part::Up, place, [*inter, hidden], *bias);
                    list.linear(Part::Down, place, [hidden, *inter], *bias);
                }
                FfnSpec::Experts(experts) => list.experts(place, experts, hidden),
            }
        }
        list
    }

    fn attention(&mut self, place: (usize, NormPlacement), spec: &AttentionSpec, hidden: usize) {
        let (q, kv) = (spec.q_width(), spec.kv_width());
        self.linear(Part::Query, place, [q, hidden], spec.qkv_bias);
        self.linear(Part::Key, place, [kv, hidden], spec.qkv_bias);
        self.linear(Part::Value, place, [kv, hidden], spec.qkv_bias);
        self.linear(Part::Output, place, [hidden, q], spec.output_bias);
        if let Some(span) = spec.qk_norm {
            let widths = if span == NormSpan::Head { (spec.head_dim, spec.head_dim) } else { (q, kv) };
            self.weight(Part::QueryNorm, place, vec![widths.0]);
            self.weight(Part::KeyNorm, place, vec![widths.1]);
        }
        if spec.sinks {
            self.push(Part::Sinks, place, "", vec![spec.heads]);
        }
    }

    fn experts(&mut self, place: (usize, NormPlacement), spec: &ExpertsSpec, hidden: usize) {
        self.linear(Part::Router, place, [spec.experts, hidden], spec.router_bias);
        if spec.choice_bias {
            self.push(Part::RouterChoice, place, "", vec![spec.experts]);
        }
        let prefix = self.names.layer_prefix(place.0);
        for expert in 0..spec.experts {
            for (name, shape) in
                [("gate", [spec.inter, hidden]), ("up", [spec.inter, hidden]), ("down", [hidden, spec.inter])]
            {
                let stem = format!("{prefix}mlp.experts.{expert}.{name}_proj");
                self.tensors.push((format!("{stem}.weight"), shape.to_vec()));
                if spec.expert_bias {
                    self.tensors.push((format!("{stem}.bias"), vec![shape[0]]));
                }
            }
        }
        if let Some(shared) = &spec.shared {
            self.linear(Part::SharedGate, place, [shared.inter, hidden], false);
            self.linear(Part::SharedUp, place, [shared.inter, hidden], false);
            self.linear(Part::SharedDown, place, [hidden, shared.inter], false);
            if shared.gated {
                self.linear(Part::SharedSwitch, place, [1, hidden], false);
            }
        }
    }

    fn linear(&mut self, part: Part, place: (usize, NormPlacement), shape: [usize; 2], bias: bool) {
        self.weight(part, place, shape.to_vec());
        if bias {
            self.push(part, place, ".bias", vec![shape[0]]);
        }
    }

    fn weight(&mut self, part: Part, place: (usize, NormPlacement), shape: Vec<usize>) {
        self.push(part, place, ".weight", shape);
    }

    fn push(&mut self, part: Part, (layer, norms): (usize, NormPlacement), suffix: &str, shape: Vec<usize>) {
        let usual = self.names.candidates(part, layer, norms).swap_remove(0);
        self.tensors.push((format!("{usual}{suffix}"), shape));
    }
}
