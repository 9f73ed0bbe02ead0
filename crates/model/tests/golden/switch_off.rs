//! Every feature of a spec, switched off one at a time, must make its golden test fail: a feature
//! that can be dropped unnoticed is not tested.

use std::{collections::HashSet, sync::Mutex, thread};

use folio_device::{Activation, RouterScore, reference::Reference};
use folio_model::{AttentionSpec, Config, ExpertsSpec, FfnSpec, LayerSpec, ModelSpec, OpenModel};
use serde_json::{Value, json};

use crate::{
    file::{self, Golden},
    run,
};

/// Changes one thing; false if the spec does not have it.
type Switch = fn(&mut ModelSpec, &Golden) -> bool;

const FEATURES: &[(&str, Switch)] = &[
    ("window", |s, _| each_attention(s, |a| a.window.take().is_some())),
    ("cap on scores", |s, _| each_attention(s, |a| a.soft_cap.take().is_some())),
    ("cap on logits", |s, _| s.logit_soft_cap.take().is_some()),
    ("sinks", |s, _| each_attention(s, |a| off(&mut a.sinks))),
    ("query and key norms", |s, _| each_attention(s, |a| a.qk_norm.take().is_some())),
    ("qkv bias", |s, _| each_attention(s, |a| off(&mut a.qkv_bias))),
    ("output bias", |s, _| each_attention(s, |a| off(&mut a.output_bias))),
    ("attention scale", |s, _| each_attention(s, |a| set(&mut a.scale, (a.head_dim as f32).powf(-0.5)))),
    ("positions", |s, _| each_attention(s, |a| a.rope.take().is_some())),
    ("layers without positions", |s, _| each_attention(s, |a| a.rope.is_none() && set(&mut a.rope, Some(0)))),
    ("rope scaling", unscale),
    ("rope magnitude", |s, _| any(s.ropes.iter_mut().map(|rope| set(&mut rope.magnitude, 1.0)))),
    ("partial rotation", rotate_whole_heads),
    ("local rope base", |s, _| s.ropes.len() > 1 && each_attention(s, |a| set(&mut a.rope, Some(0)))),
    ("global rope base", |s, _| s.ropes.len() > 1 && each_attention(s, |a| set(&mut a.rope, Some(1)))),
    ("norm before attention", |s, _| each_layer(s, |l| off(&mut l.norms.before_attention))),
    ("norm after attention", |s, _| each_layer(s, |l| off(&mut l.norms.after_attention))),
    ("norm before ffn", |s, _| each_layer(s, |l| off(&mut l.norms.before_ffn))),
    ("norm after ffn", |s, _| each_layer(s, |l| off(&mut l.norms.after_ffn))),
    ("norm offset", |s, _| set(&mut s.norm_offset, 0.0)),
    ("norm epsilon", |s, _| set(&mut s.norm_eps, 0.0)),
    ("embedding multiplier", |s, _| set(&mut s.embed_scale, 1.0)),
    ("residual multiplier", |s, _| each_layer(s, |l| set(&mut l.residual_scale, 1.0))),
    ("logit multiplier", |s, _| set(&mut s.logit_scale, 1.0)),
    ("head tied or not", |s, _| flip(&mut s.tied_head)),
    ("activation", |s, _| each_activation(s, |a| set(a, other_activation(*a)))),
    ("activation limit", |s, _| each_activation(s, lift_limit)),
    ("activation slope", |s, _| each_activation(s, flatten_slope)),
    ("ffn bias", |s, _| each_layer(s, drop_ffn_bias)),
    ("expert bias", |s, _| each_experts(s, |e| off(&mut e.expert_bias))),
    ("router bias", |s, _| each_experts(s, |e| off(&mut e.router_bias))),
    ("number of experts taken", |s, _| each_experts(s, take_one_less)),
    ("router score", |s, _| each_experts(s, |e| set(&mut e.score, RouterScore::Sigmoid))),
    ("weights normalized or not", |s, _| each_experts(s, |e| sums_to_one_by_norm(e) && flip(&mut e.normalize))),
];

fn any(changes: impl Iterator<Item = bool>) -> bool {
    changes.fold(false, |before, changed| before | changed)
}

fn set<T: PartialEq>(place: &mut T, value: T) -> bool {
    let changed = *place != value;
    *place = value;
    changed
}

fn off(switch: &mut bool) -> bool {
    std::mem::take(switch)
}

fn flip(switch: &mut bool) -> bool {
    *switch = !*switch;
    true
}

fn each_layer(spec: &mut ModelSpec, change: impl Fn(&mut LayerSpec) -> bool) -> bool {
    any(spec.layers.iter_mut().map(change))
}

fn each_attention(spec: &mut ModelSpec, change: impl Fn(&mut AttentionSpec) -> bool) -> bool {
    each_layer(spec, |layer| change(&mut layer.attention))
}

fn each_experts(spec: &mut ModelSpec, change: impl Fn(&mut ExpertsSpec) -> bool) -> bool {
    each_layer(spec, |layer| match &mut layer.ffn {
        FfnSpec::Experts(experts) => change(experts),
        FfnSpec::Dense { .. } => false,
    })
}

fn each_activation(spec: &mut ModelSpec, change: impl Fn(&mut Activation) -> bool) -> bool {
    each_layer(spec, |layer| match &mut layer.ffn {
        FfnSpec::Dense { activation, .. } => change(activation),
        FfnSpec::Experts(experts) => change(&mut experts.activation),
    })
}

fn drop_ffn_bias(layer: &mut LayerSpec) -> bool {
    match &mut layer.ffn {
        FfnSpec::Dense { bias, .. } => off(bias),
        FfnSpec::Experts(_) => false,
    }
}

fn take_one_less(experts: &mut ExpertsSpec) -> bool {
    experts.top_k -= 1;
    true
}

fn other_activation(activation: Activation) -> Activation {
    if activation == Activation::Silu { Activation::GeluTanh } else { Activation::Silu }
}

fn lift_limit(activation: &mut Activation) -> bool {
    match activation {
        Activation::SwigluClamped { limit, .. } => set(limit, 1e9),
        _ => false,
    }
}

fn flatten_slope(activation: &mut Activation) -> bool {
    match activation {
        Activation::SwigluClamped { alpha, .. } => set(alpha, 1.0),
        _ => false,
    }
}

/// The softmax of the best sums to one whether or not it is normalized again.
fn sums_to_one_by_norm(experts: &ExpertsSpec) -> bool {
    experts.score != RouterScore::SoftmaxOfBest
}

fn rotate_whole_heads(spec: &mut ModelSpec, _: &Golden) -> bool {
    let pairs = spec.layers[0].attention.head_dim / 2;
    any(spec.ropes.iter_mut().map(|rope| {
        let partial = rope.inv_freq.len() < pairs;
        rope.inv_freq.resize(pairs, 0.01);
        partial
    }))
}

/// The same rotary embeddings from the same config without its scaling; magnitudes stay.
fn unscale(spec: &mut ModelSpec, golden: &Golden) -> bool {
    let mut config = golden.config.clone();
    config["rope_scaling"] = Value::Null;
    if let Some(nested) = config.get_mut("rope_parameters") {
        for layer_type in ["full_attention", "sliding_attention"] {
            if let Some(inner) = nested.get_mut(layer_type) {
                *inner = plain(inner);
            }
        }
        *nested = plain(nested);
    }
    config["max_position_embeddings"] = json!(golden.max_context);
    let model = OpenModel::from_config(&config.to_string(), Box::new(golden.weights())).expect("a plain config");
    let mut ropes = model.spec.ropes;
    ropes.iter_mut().zip(&spec.ropes).for_each(|(rope, scaled)| rope.magnitude = scaled.magnitude);
    set(&mut spec.ropes, ropes)
}

fn plain(parameters: &Value) -> Value {
    let kept = ["rope_theta", "partial_rotary_factor", "full_attention", "sliding_attention"];
    let fields = parameters.as_object().into_iter().flatten().filter(|(key, _)| kept.contains(&key.as_str()));
    fields.map(|(key, value)| (key.clone(), value.clone())).collect::<serde_json::Map<_, _>>().into()
}

/// The golden's model, from its config.json and weights.
pub fn open(golden: &Golden) -> Result<OpenModel, String> {
    let config = Config::from_json("config.json", &golden.config.to_string()).map_err(|e| e.to_string())?;
    let config = config.with_max_context(Some(golden.max_context));
    OpenModel::from_parsed(&config, Box::new(golden.weights())).map_err(|e| e.to_string())
}

/// Compares prompt logits of this spec: an error counts as a deviation too, because some features
/// cannot be dropped without one.
fn prompt_agrees(golden: &Golden, model: &OpenModel) -> bool {
    let rows = golden.prompt.len();
    let logits =
        run::Sequence::new(Reference::new(), model, rows, rows).and_then(|mut s| s.prompt(&golden.prompt, rows));
    logits.is_ok_and(|logits| run::compare(golden, &logits).is_ok())
}

/// Features of a golden file, and those among them that can be switched off unnoticed.
fn examine(golden: &Golden) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut model = open(golden).unwrap_or_else(|problem| panic!("{}: {problem}", golden.name));
    assert!(prompt_agrees(golden, &model), "{}: differs with all features on", golden.name);
    let whole = model.spec.clone();
    let (mut had, mut unnoticed) = (Vec::new(), Vec::new());
    for (feature, switch) in FEATURES {
        model.spec = whole.clone();
        if switch(&mut model.spec, golden) {
            had.push(*feature);
            if prompt_agrees(golden, &model) {
                unnoticed.push(*feature);
            }
        }
    }
    (had, unnoticed)
}

#[test]
fn every_feature_matters() {
    let goldens = Mutex::new(file::all());
    let (seen, unnoticed) = (Mutex::new(HashSet::new()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(golden) = goldens.lock().expect("the list").pop() else { return };
                    let (had, missed) = examine(&golden);
                    println!("{:28} {}", golden.name, had.join(", "));
                    seen.lock().expect("the set").extend(had);
                    let missed = missed.iter().map(|feature| format!("{}: {feature}", golden.name));
                    unnoticed.lock().expect("the list").extend(missed);
                }
            });
        }
    });
    let unnoticed = unnoticed.into_inner().expect("the list");
    assert!(unnoticed.is_empty(), "switched off unnoticed:\n{}", unnoticed.join("\n"));
    let seen = seen.into_inner().expect("the set");
    let absent: Vec<_> = FEATURES.iter().map(|(name, _)| *name).filter(|name| !seen.contains(name)).collect();
    assert!(absent.is_empty(), "no golden file has {absent:?}");
}
