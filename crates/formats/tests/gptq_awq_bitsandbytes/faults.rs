//! Damaged GPTQ, AWQ and bitsandbytes layers are refused with an error that names the tensor and
//! the fault.

use std::collections::BTreeMap;

use folio_formats::{Format, WeightSource, packing};
use folio_testing::{Rng, Tensor, Weights};
use serde_json::{Value, json};

use crate::made;

/// One golden case: a layer in the tool's form.
#[derive(Clone)]
struct Layer {
    name: String,
    config: Value,
    rows: usize,
    cols: usize,
    tensors: Weights,
}

impl Layer {
    /// Reads all values of the layer, or returns the refusal.
    fn values(&self) -> Result<Vec<f32>, String> {
        let packing = packing::open(&self.config).map_err(|error| error.to_string())?.unwrap();
        let packed = packing.matrix(&self.tensors, &self.name, self.rows, self.cols).map_err(|e| e.to_string())?;
        assert_eq!((packed.matrix.num_rows(), packed.matrix.cols()), (self.rows, self.cols));
        let mut values = vec![0.0; self.rows * self.cols];
        for (row, values) in values.chunks_exact_mut(self.cols).enumerate() {
            packed.matrix.read_row(row, values);
        }
        Ok(values)
    }

    fn load(&self) -> Result<(), String> {
        self.values().map(|_| ())
    }

    fn part(&mut self, part: &str) -> &mut Tensor {
        self.tensors.get_mut(&format!("{}.{part}", self.name))
    }

    fn reshape(&mut self, part: &str, shape: &[usize]) {
        let tensor = self.part(part);
        tensor.shape = shape.to_vec();
        let size = shape.iter().product::<usize>() * tensor.format.block_bytes();
        tensor.bytes.resize(size, 0);
    }

    fn set(&mut self, part: &str, at: usize, bytes: &[u8]) {
        self.part(part).bytes[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
    }
}

fn layers() -> BTreeMap<String, Layer> {
    let (json, source) = made::golden();
    let layer = |case: &Value| {
        let name = case["name"].as_str().unwrap().to_owned();
        let own = |tensor: &&str| tensor.strip_prefix(&name).is_some_and(|rest| rest.starts_with('.'));
        let copy = |tensor: &str| (tensor.to_owned(), Tensor::from(source.require(tensor).unwrap()));
        let tensors = Weights(source.names().into_iter().filter(own).map(copy).collect());
        let [rows, cols] = ["rows", "cols"].map(|key| case[key].as_u64().unwrap() as usize);
        (name.clone(), Layer { name, config: case["config"].clone(), rows, cols, tensors })
    };
    json["cases"].as_array().unwrap().iter().map(layer).collect()
}

type Damage = fn(&mut Layer);

const NAN16: [u8; 2] = 0x7e00u16.to_le_bytes();
const INFINITE16: [u8; 2] = 0x7c00u16.to_le_bytes();
const NAN32: [u8; 4] = f32::NAN.to_le_bytes();
const INFINITE32: [u8; 4] = f32::INFINITY.to_le_bytes();

#[test]
fn each_fault_is_named() {
    let layers = layers();
    let rows: &[(&str, Damage, &str)] = &[
        // GPTQ: 32 outputs, 64 inputs in groups of 32, 4 bits.
        ("gptq-4-gptq", |l| l.reshape("qweight", &[7, 32]), "gptq-4-gptq.qweight has shape [7, 32], but [8, 32]"),
        ("gptq-4-gptq", |l| l.reshape("qweight", &[8, 33]), "gptq-4-gptq.qweight has shape [8, 33], but [8, 32]"),
        ("gptq-4-gptq", |l| l.reshape("qweight", &[256]), "gptq-4-gptq.qweight has shape [256], but [8, 32]"),
        ("gptq-4-gptq", |l| l.part("qweight").format = Format::F32, "qweight is stored as F32, but I32"),
        ("gptq-4-gptq", |l| l.reshape("qzeros", &[2, 3]), "gptq-4-gptq.qzeros has shape [2, 3], but [2, 4]"),
        ("gptq-4-gptq", |l| l.reshape("qzeros", &[1, 4]), "gptq-4-gptq.qzeros has shape [1, 4], but [2, 4]"),
        ("gptq-4-gptq", |l| l.reshape("scales", &[3, 32]), "gptq-4-gptq.scales has shape [3, 32], but [2, 32]"),
        ("gptq-4-gptq", |l| l.config["group_size"] = json!(64), "scales has shape [2, 32], but [1, 32]"),
        ("gptq-4-gptq", |l| l.config["group_size"] = json!(16), "scales has shape [2, 32], but [4, 32]"),
        ("gptq-4-gptq", |l| l.config["bits"] = json!(8), "qweight has shape [8, 32], but [16, 32]"),
        ("gptq-4-gptq", |l| l.set("scales", 33, &NAN16), "scales has a scale of NaN for group 1 of output 1"),
        ("gptq-4-gptq", |l| l.set("scales", 2, &INFINITE16), "scales has a scale of inf for group 0 of output 2"),
        ("gptq-4-gptq", |l| l.set("scales", 63, &[0, 0]), "scales has a scale of 0 for group 1 of output 31"),
        ("gptq-4-gptq", |l| l.set("g_idx", 5, &2i32.to_le_bytes()), "g_idx puts input 5 into group 2 of 2"),
        ("gptq-4-gptq", |l| l.set("g_idx", 5, &(-1i32).to_le_bytes()), "g_idx puts input 5 into group -1 of 2"),
        ("gptq-4-gptq", |l| l.set("g_idx", 5, &1i32.to_le_bytes()), "g_idx gives group 0 31 inputs, but it has 32"),
        ("gptq-4-gptq", |l| l.part("g_idx").bytes.fill(0), "g_idx gives group 0 64 inputs, but it has 32"),
        ("gptq-4-gptq", |l| l.reshape("g_idx", &[63]), "g_idx has shape [63], but [64]"),
        ("gptq-4-gptq", |l| l.part("g_idx").format = Format::F32, "g_idx is stored as F32, but I32"),
        ("gptq-4-gptq", |l| l.cols = 72, "qweight has shape [8, 32], but [9, 32]"),
        ("gptq-3-gptq", |l| l.cols = 63, "has 3 bits a code, which takes multiples of 32, but is [32, 63]"),
        ("gptq-3-gptq", |l| l.reshape("qzeros", &[2, 4]), "qzeros has shape [2, 4], but [2, 3]"),
        ("gptq-4-g128-act-order", |l| l.set("g_idx", 0, &2i32.to_le_bytes()), "g_idx puts input 0 into group 2 of 2"),
        (
            "gptq-4-short-last-group-act-order",
            |l| l.part("g_idx").bytes.fill(0),
            "g_idx gives group 0 160 inputs, but it has 64",
        ),
        // AWQ: 16 outputs, 128 inputs in groups of 32.
        ("awq-32", |l| l.reshape("qweight", &[127, 2]), "awq-32.qweight has shape [127, 2], but [128, 2]"),
        ("awq-32", |l| l.reshape("qweight", &[128, 3]), "awq-32.qweight has shape [128, 3], but [128, 2]"),
        ("awq-32", |l| l.reshape("qzeros", &[4, 1]), "awq-32.qzeros has shape [4, 1], but [4, 2]"),
        ("awq-32", |l| l.reshape("qzeros", &[5, 2]), "awq-32.qzeros has shape [5, 2], but [4, 2]"),
        ("awq-32", |l| l.reshape("scales", &[4, 17]), "awq-32.scales has shape [4, 17], but [4, 16]"),
        ("awq-32", |l| l.set("scales", 0, &NAN16), "awq-32.scales has a scale of NaN for group 0 of output 0"),
        ("awq-32", |l| l.set("scales", 17, &INFINITE16), "awq-32.scales has a scale of inf for group 1 of output 1"),
        ("awq-32", |l| l.set("scales", 63, &[0, 0x80]), "awq-32.scales has a scale of -0 for group 3 of output 15"),
        ("awq-32", |l| l.rows = 15, "words of 8 outputs and groups of 32 inputs, which [15, 128]"),
        ("awq-32", |l| l.config["group_size"] = json!(48), "groups of 48 inputs, which [16, 128]"),
        ("awq-32", |l| l.config["group_size"] = json!(64), "qzeros has shape [4, 2], but [2, 2]"),
        // bitsandbytes, 4 bits: 8 outputs, 128 inputs in blocks of 64.
        (
            "nf4-single-64",
            |l| l.reshape("weight", &[511, 1]),
            "weight has 511 bytes, but [8, 128] of four bits needs 512",
        ),
        (
            "nf4-single-64",
            |l| l.reshape("weight", &[513, 1]),
            "weight has 513 bytes, but [8, 128] of four bits needs 512",
        ),
        ("nf4-single-64", |l| l.rows = 9, "is [9, 128], but its quant_state says [8, 128]"),
        ("nf4-single-64", |l| l.reshape("weight.absmax", &[17]), "weight.absmax has shape [17], but [16]"),
        ("nf4-single-64", |l| l.reshape("weight.absmax", &[15]), "weight.absmax has shape [15], but [16]"),
        ("nf4-single-64", |l| l.set("weight.absmax", 7, &NAN32), "weight.absmax is NaN at 7"),
        ("nf4-single-64", |l| l.set("weight.absmax", 7, &INFINITE32), "weight.absmax is inf at 7"),
        ("nf4-single-64", |l| l.reshape("weight.quant_map", &[15]), "weight.quant_map has shape [15], but [16]"),
        (
            "nf4-single-64",
            |l| l.set("weight.quant_map", 3, &0.5f32.to_le_bytes()),
            "weight.quant_map has 0.5 for code 3, but nf4 has -0.39491",
        ),
        ("nf4-single-64", |l| state(l, |s| s["blocksize"] = json!(0)), "says blocksize 0, but a power of two"),
        ("nf4-single-64", |l| state(l, |s| s["blocksize"] = json!(96)), "says blocksize 96, but a power of two"),
        ("nf4-single-64", |l| state(l, |s| s["blocksize"] = json!(1u64 << 40)), "blocksize 1099511627776, but"),
        ("nf4-single-64", |l| state(l, |s| s["blocksize"] = json!(128)), "weight.absmax has shape [16], but [8]"),
        ("nf4-single-64", |l| state(l, |s| s["blocksize"] = json!(-1)), "is not as expected: invalid value"),
        ("nf4-single-64", |l| state(l, |s| s["quant_type"] = json!("fp4")), "says quant_type \"fp4\""),
        ("nf4-single-64", |l| state(l, |s| s["quant_type"] = json!("")), "says quant_type \"\""),
        ("nf4-single-64", |l| state(l, |s| s["shape"] = json!([128, 8])), "its quant_state says [128, 8]"),
        ("nf4-single-64", |l| state(l, |s| s["padding"] = json!("x".repeat(5000))), "4096 at most, is needed"),
        ("nf4-single-64", |l| l.part(NF4_STATE).bytes.fill(b'{'), "is not as expected: key must be a string"),
        ("nf4-single-64", |l| state(l, |s| s["nested_blocksize"] = json!(256)), "absmax is stored as F32, but U8"),
        ("nf4-double-64", |l| state(l, |s| s["nested_blocksize"] = json!(0)), "a nested_blocksize of 0"),
        ("nf4-double-64", |l| state(l, |s| s["nested_blocksize"] = json!(8)), "nested_absmax has shape [1], but [2]"),
        ("nf4-double-64", |l| state(l, |s| s["nested_blocksize"] = Value::Null), "absmax is stored as U8, but F32"),
        ("nf4-double-64", |l| state(l, |s| s["nested_offset"] = json!(1e300)), "nested_offset that is missing or no"),
        ("nf4-double-64", |l| state(l, |s| s["nested_offset"] = Value::Null), "nested_offset that is missing or no"),
        ("nf4-double-64", |l| state(l, |s| s["nested_dtype"] = json!("half")), "nested_dtype \"half\""),
        (
            "nf4-double-64",
            |l| l.reshape("weight.nested_quant_map", &[255]),
            "nested_quant_map has shape [255], but [256]",
        ),
        ("nf4-double-64", |l| l.set("weight.nested_quant_map", 3, &NAN32), "nested_quant_map is NaN at 3"),
        ("nf4-double-64", |l| l.set("weight.nested_absmax", 0, &INFINITE32), "nested_absmax is inf at 0"),
        // bitsandbytes, 8 bits: 8 outputs, 128 inputs.
        ("int8", |l| l.reshape("weight", &[8, 127]), "int8.weight has shape [8, 127], but [8, 128]"),
        ("int8", |l| l.part("weight").format = Format::U8, "int8.weight is stored as U8, but I8"),
        ("int8", |l| l.reshape("SCB", &[7]), "int8.SCB has shape [7], but [8]"),
        ("int8", |l| l.set("SCB", 4, &NAN32), "int8.SCB is NaN at 4"),
        ("int8", |l| l.set("SCB", 0, &INFINITE32), "int8.SCB is inf at 0"),
        ("int8", |l| l.set("weight_format", 0, &[2]), "int8.weight_format is Some(2), but only 0"),
        ("int8", |l| l.reshape("weight_format", &[2]), "int8.weight_format is"),
    ];
    for (name, damage, expect) in rows {
        let mut layer = layers[*name].clone();
        assert_eq!(layer.load(), Ok(()), "{name}");
        damage(&mut layer);
        let error = layer.load().expect_err(&format!("{name}: no error with {expect:?}"));
        assert!(error.contains(expect), "{name}: {error}");
    }
}

const NF4_STATE: &str = "weight.quant_state.bitsandbytes__nf4";

/// Changes the JSON state of a four-bit layer.
fn state(layer: &mut Layer, change: fn(&mut Value)) {
    let tensor = layer.part(NF4_STATE);
    let mut json = serde_json::from_slice(&tensor.bytes).unwrap();
    change(&mut json);
    tensor.bytes = serde_json::to_vec(&json).unwrap();
    tensor.shape = vec![tensor.bytes.len()];
}

#[test]
fn what_the_configuration_says_is_checked() {
    let gptq = |change: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        config
    };
    for (config, expect) in [
        (gptq(json!({"bits": 5})), "quantization_config.bits is 5, but only 2, 3, 4 and 8 are read"),
        (gptq(json!({"bits": "4"})), "quantization_config.bits is not a whole number"),
        (gptq(json!({"bits": null})), "quantization_config.bits is missing"),
        (gptq(json!({"group_size": 0})), "quantization_config.group_size is 0, but it must be -1 or positive"),
        (gptq(json!({"group_size": -2})), "quantization_config.group_size is -2"),
        (gptq(json!({"checkpoint_format": "marlin"})), "checkpoint_format is \"marlin\", but only gptq and gptq_v2"),
        (gptq(json!({"checkpoint_format": "gptq_p", "bits": 3})), "checkpoint_format is \"gptq_p\""),
        (gptq(json!({"is_marlin_format": true})), "quantization_config.is_marlin_format is true"),
        (gptq(json!({"pack_dtype": "int16"})), "quantization_config.pack_dtype is \"int16\", but only int32"),
        (gptq(json!({"dynamic": {"+:.*up": {"bits": 6}}})), "quantization_config.dynamic.+:.*up.bits is 6"),
        (gptq(json!({"dynamic": {".*up": {"group_size": 0}}})), "quantization_config.dynamic..*up.group_size is 0"),
        (json!({"quant_method": "awq", "bits": 8, "group_size": 128}), "bits is 8, but AWQ is read with 4 bits alone"),
        (json!({"quant_method": "awq", "w_bit": 4}), "quantization_config.group_size is missing"),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}),
            "quantization_config.version is \"gemv\", but AWQ weights are read in gemm packing alone",
        ),
        (json!({"quant_method": "bitsandbytes"}), "quantization_config.load_in_4bit or load_in_8bit must be true"),
    ] {
        let error = packing::open(&config).expect_err(expect).to_string();
        assert!(error.contains(expect), "{error}");
    }
    for config in [
        gptq(json!({"checkpoint_format": "gptq_p"})),
        gptq(json!({"dynamic": {"-:.*down": {}, "+:.*up": {"bits": 8, "group_size": -1}, ".*o_proj": {}}})),
        json!({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
        json!({"quant_method": "bitsandbytes", "_load_in_8bit": true, "_load_in_4bit": false}),
    ] {
        assert!(packing::open(&config).is_ok(), "{config}");
    }
}

/// A model with different rules for its layers: each layer's tensors show which rule applies.
#[test]
fn dynamic_rules_are_seen_from_the_tensors() {
    let layers = layers();
    let config = |bits: u32, other: Value| json!({"quant_method": "gptq", "bits": bits, "group_size": 128, "dynamic": {"+:.*": other, "-:lm_head": {}}});
    for (name, first_bits, other) in [
        ("gptq-8-gptq", 4, json!({"bits": 8, "group_size": 32})),
        ("gptq-4-gptq", 4, json!({"group_size": 32})),
        ("gptq-2-symmetric-channel", 8, json!({"bits": 2, "group_size": -1})),
    ] {
        let mut layer = layers[name].clone();
        layer.config = config(first_bits, json!({}));
        assert!(layer.load().is_err(), "{name}");
        layer.config = config(first_bits, other);
        assert_eq!(layer.load(), Ok(()), "{name}");
    }
}

#[test]
fn inputs_in_order_need_no_g_idx() {
    let mut layer = layers()["gptq-4-gptq"].clone();
    layer.tensors.0.remove("gptq-4-gptq.g_idx");
    assert_eq!(layer.load(), Ok(()));
    layer.config["desc_act"] = json!(true);
    assert!(layer.load().unwrap_err().contains("no tensor named gptq-4-gptq.g_idx"));
}

/// Every tensor of every case: left out, one longer or shorter in each dimension, of another type.
#[test]
fn nothing_may_be_missing_or_off_by_one() {
    for (name, layer) in layers() {
        let parts: Vec<String> = layer.tensors.0.keys().cloned().collect();
        for part in parts {
            let optional = part.ends_with(".g_idx") || part.ends_with(".weight_format");
            let mut without = layer.clone();
            without.tensors.0.remove(&part);
            assert!(optional || without.load().is_err(), "{name} without {part}");
            let short = part.strip_prefix(&format!("{name}.")).unwrap();
            let shape = layer.tensors.get(&part).shape.clone();
            for dim in 0..shape.len() {
                for size in [shape[dim] - 1, shape[dim] + 1, 0] {
                    let mut damaged = layer.clone();
                    let mut shape = shape.clone();
                    shape[dim] = size;
                    damaged.reshape(short, &shape);
                    assert!(damaged.load().is_err(), "{name}: {part} as {shape:?}");
                }
            }
            let mut damaged = layer.clone();
            let tensor = damaged.part(short);
            tensor.format = if tensor.format == Format::F64 { Format::F32 } else { Format::F64 };
            assert!(short == "weight" || short == "weight_format" || damaged.load().is_err(), "{name}: {part} as F64");
        }
    }
}

/// A flipped bit of any tensor changes the values, or is refused. Tables are left out: one is the
/// same in all files, and few entries are used of the other, for scales quantized twice.
#[test]
fn every_tensor_counts() {
    for (name, layer) in layers() {
        let values = layer.values().unwrap();
        for part in layer.tensors.0.keys().filter(|part| !part.ends_with("quant_map")) {
            let mut damaged = layer.clone();
            let tensor = damaged.tensors.get_mut(part);
            tensor.bytes[tensor.format.block_bytes() - 1] ^= 1;
            assert!(damaged.values().as_ref() != Ok(&values), "{name}: {part}");
        }
    }
}

/// Bytes changed at random never end in a panic.
#[test]
fn changed_bytes_are_read_or_refused() {
    let mut rng = Rng::new(1);
    let mut refused = 0;
    for layer in layers().into_values() {
        let parts: Vec<String> = layer.tensors.0.keys().cloned().collect();
        for _ in 0..60 {
            let mut damaged = layer.clone();
            for _ in 0..1 + rng.below(3) {
                let bytes = &mut damaged.tensors.get_mut(&parts[rng.below(parts.len())]).bytes;
                let at = rng.below(bytes.len());
                bytes[at] = rng.below(256) as u8;
            }
            refused += usize::from(damaged.load().is_err());
        }
    }
    assert!(refused > 100, "{refused}");
}
