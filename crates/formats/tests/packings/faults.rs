//! Packed layers and configurations that are broken or contradict each other: a clear refusal each,
//! no panic.

use folio_formats::packing;
use folio_formats::{Format, WeightSource};
use folio_testing::{Tensor, Weights};
use serde_json::{Value, json};

use crate::made;

/// A good layer of the golden file, to be damaged.
struct Layer {
    name: String,
    shape: (usize, usize),
    config: Value,
    tensors: Weights,
}

impl Layer {
    fn good(name: &str) -> Self {
        let about =
            made::golden()["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).expect(name).clone();
        let file = made::source(made::tensors());
        let mut tensors = Weights::default();
        for full in file.names() {
            if full.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')) {
                tensors.put(full, file.tensor(full).unwrap().into());
            }
        }
        let side = |field: &str| about[field].as_u64().unwrap() as usize;
        Self { name: name.to_owned(), shape: (side("rows"), side("cols")), config: about["config"].clone(), tensors }
    }

    fn tensor_mut(&mut self, suffix: &str) -> &mut Tensor {
        self.tensors.get_mut(&format!("{}.{suffix}", self.name))
    }

    fn remove(&mut self, suffix: &str) {
        self.tensors.0.remove(&format!("{}.{suffix}", self.name)).expect("a tensor of the golden file");
    }

    fn add(&mut self, suffix: &str, format: Format, shape: &[usize], bytes: Vec<u8>) {
        self.tensors.put(&format!("{}.{suffix}", self.name), Tensor { format, shape: shape.to_vec(), bytes });
    }

    /// The same tensor in another shape, its bytes cut or filled to fit.
    fn reshape(&mut self, suffix: &str, shape: &[usize]) {
        let tensor = self.tensor_mut(suffix);
        let values = shape.iter().product::<usize>() as u64;
        tensor.bytes.resize(tensor.format.bytes_for(values).unwrap() as usize, 0);
        tensor.shape = shape.to_vec();
    }

    fn weights(&mut self, field: &str, value: Value) {
        self.config["config_groups"]["group_0"]["weights"][field] = value;
    }

    fn refusal(&self) -> Option<String> {
        let read = || -> folio_formats::Result<()> {
            let packing = packing::open(&self.config)?.expect("a packing");
            assert!(packing.holds(&self.tensors, &self.name), "{} is not held", self.name);
            packing.matrix(&self.tensors, &self.name, self.shape.0, self.shape.1).map(|_| ())
        };
        read().err().map(|error| error.to_string())
    }
}

type Fault = (&'static str, fn(&mut Layer), &'static str);

fn check(faults: &[Fault]) {
    for (name, spoil, expect) in faults {
        let mut layer = Layer::good(name);
        assert_eq!(layer.refusal(), None, "{name}");
        spoil(&mut layer);
        match layer.refusal() {
            Some(found) => assert!(found.contains(expect), "{name}: expected {expect:?}, found {found:?}"),
            None => panic!("{name}: expected {expect:?}, but it reads"),
        }
    }
}

fn nan16(layer: &mut Layer, suffix: &str, at: usize) {
    layer.tensor_mut(suffix).bytes[2 * at..2 * at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
}

#[test]
fn tensors() {
    check(&[
        (
            "pack4-group",
            |l| l.reshape("weight_packed", &[20, 11]),
            "has shape [20, 11], but [20, 12] is needed for 96 values of 4 bits",
        ),
        (
            "pack4-group",
            |l| l.reshape("weight_packed", &[20, 13]),
            "tensor pack4-group.weight_packed has shape [20, 13]",
        ),
        ("pack4-group", |l| l.reshape("weight_packed", &[19, 12]), "has shape [19, 12]"),
        ("pack4-group", |l| l.reshape("weight_packed", &[240]), "has shape [240]"),
        ("pack4-group", |l| l.tensor_mut("weight_packed").format = Format::F32, "is stored as F32, but I32 is needed"),
        (
            "pack4-group",
            |l| l.reshape("weight_scale", &[20, 2]),
            "weight_scale has shape [20, 2], but [20, 3] is needed",
        ),
        (
            "pack4-group",
            |l| l.reshape("weight_scale", &[20, 4]),
            "weight_scale has shape [20, 4], but [20, 3] is needed",
        ),
        ("pack4-group", |l| l.reshape("weight_scale", &[3, 20]), "weight_scale has shape [3, 20]"),
        ("pack4-group", |l| l.remove("weight_scale"), "no tensor named pack4-group.weight_scale"),
        ("pack4-group", |l| nan16(l, "weight_scale", 4), "weight_scale is NaN at [1, 1], but must be finite"),
        (
            "pack4-group",
            |l| l.tensor_mut("weight_scale").bytes[..2].copy_from_slice(&0x7f80u16.to_le_bytes()),
            "is inf at [0, 0]",
        ),
        (
            "pack4-group",
            |l| l.tensor_mut("weight_scale").bytes.fill(0),
            "is zero for row 0, group 0, where weights are not",
        ),
        (
            "pack4-group",
            |l| l.tensor_mut("weight_scale").format = Format::I16,
            "is stored as I16, but F32 or BF16 or F16 is needed",
        ),
        (
            "pack4-group",
            |l| l.tensor_mut("weight_shape").bytes[0] = 21,
            "weight_shape says [21, 96], but the layer is [20, 96]",
        ),
        ("pack4-group", |l| l.reshape("weight_shape", &[3]), "weight_shape says [20, 96, 0]"),
        ("pack4-group", |l| l.tensor_mut("weight_shape").format = Format::F64, "weight_shape is stored as F64"),
        ("pack4-group", |l| l.shape.1 = 128, "weight_shape says [20, 96], but the layer is [20, 128]"),
        (
            "pack4-group",
            |l| l.add("weight_g_idx", Format::I32, &[96], vec![0; 384]),
            "gives group 0 96 columns, but 32 belong to it",
        ),
        ("pack4-zeros", |l| l.remove("weight_zero_point"), "no tensor named pack4-zeros.weight_zero_point"),
        (
            "pack4-zeros",
            |l| l.reshape("weight_zero_point", &[2, 2]),
            "weight_zero_point has shape [2, 2], but [3, 2] is needed",
        ),
        ("pack4-zeros", |l| l.reshape("weight_zero_point", &[3, 3]), "weight_zero_point has shape [3, 3]"),
        ("pack4-zeros", |l| l.tensor_mut("weight_zero_point").format = Format::BF16, "is stored as BF16"),
        ("pack4-index", |l| l.reshape("weight_g_idx", &[95]), "weight_g_idx has shape [95], but [96] is needed"),
        ("pack4-index", |l| l.tensor_mut("weight_g_idx").bytes[0] = 3, "names group 3, but there are 3"),
        ("pack4-index", |l| l.tensor_mut("weight_g_idx").bytes[3] = 0x80, "names group -2147483647"),
        ("pack4-index", |l| l.tensor_mut("weight_g_idx").bytes[0] = 2, "columns, but 32 belong to it"),
        ("pack3-group", |l| l.reshape("weight_packed", &[8, 8]), "has shape [8, 8], but [8, 9] is needed"),
        ("int8-channel", |l| l.reshape("weight", &[12, 71]), "weight has shape [12, 71], but [12, 72] is needed"),
        ("int8-channel", |l| l.tensor_mut("weight").format = Format::U8, "is stored as U8, but I8 is needed"),
        ("int8-channel", |l| l.reshape("weight_scale", &[12, 2]), "has shape [12, 2], but [12, 1] is needed"),
        ("int8-channel", |l| l.reshape("weight_scale", &[1]), "has shape [1], but [12, 1] is needed"),
        (
            "int8-channel",
            |l| l.add("weight_zero_point", Format::I8, &[12, 1], vec![1; 12]),
            "is not zero, but the configuration says symmetric",
        ),
        ("int8-zeros", |l| l.reshape("weight_zero_point", &[8]), "has shape [8], but [9, 1] is needed"),
        ("int4-in-bytes", |l| l.tensor_mut("weight").bytes[65] = 8, "is 8 at [1, 1], which has more than 4 bits"),
        ("float8-tensor", |l| l.reshape("weight_scale", &[9]), "has shape [9], but [1, 1] is needed"),
        ("float8-tensor", |l| l.tensor_mut("weight_scale").bytes.fill(0), "is zero at [0, 0], where weights are not"),
        (
            "float8-channel",
            |l| l.tensor_mut("weight").bytes[100] = 0x7f,
            "row 1 has code 127, which stands for no number",
        ),
        (
            "float8-channel",
            |l| l.tensor_mut("weight").format = Format::I8,
            "weight is stored as I8, but F8_E4M3 is needed",
        ),
        ("float8-block", |l| l.reshape("weight_scale", &[2, 3]), "has shape [2, 3], but [3, 3] is needed"),
        ("float8-block", |l| nan16(l, "weight_scale", 5), "weight_scale is NaN at [1, 2]"),
        ("nvfp4", |l| l.reshape("weight_packed", &[12, 31]), "has shape [12, 31], but [12, 32] is needed"),
        ("nvfp4", |l| l.reshape("weight_scale", &[12, 2]), "has shape [12, 2], but [12, 4] is needed"),
        ("nvfp4", |l| l.tensor_mut("weight_scale").format = Format::U8, "is stored as U8, but F8_E4M3 is needed"),
        ("nvfp4", |l| l.tensor_mut("weight_scale").bytes[7] = 0xff, "is NaN at [1, 3]"),
        ("nvfp4", |l| l.remove("weight_global_scale"), "no tensor named nvfp4.weight_global_scale"),
        ("nvfp4", |l| l.tensor_mut("weight_global_scale").bytes.fill(0), "is 0, but must be positive and finite"),
        ("nvfp4", |l| l.tensor_mut("weight_global_scale").bytes[3] ^= 0x80, "is -300, but must be positive"),
        (
            "nvfp4",
            |l| l.tensor_mut("weight_global_scale").bytes.copy_from_slice(&1e-40f32.to_le_bytes()),
            "which makes scales infinite",
        ),
        ("nvfp4", |l| l.reshape("weight_global_scale", &[2]), "has shape [2], but one number is needed"),
        ("mxfp4", |l| l.tensor_mut("weight_scale").bytes[4] = 255, "is NaN at [1, 1]"),
        ("mxfp4", |l| l.reshape("weight_scale", &[12, 2]), "has shape [12, 2], but [12, 3] is needed"),
        ("mxfp8", |l| l.tensor_mut("weight_scale").format = Format::I8, "is stored as I8, but U8 or F8_E8M0 is needed"),
        ("modelopt-fp8", |l| l.reshape("weight_scale", &[3]), "has shape [3], but [1, 1] is needed"),
        ("modelopt-fp8", |l| l.remove("weight_scale"), "no tensor named modelopt-fp8.weight_scale"),
        (
            "modelopt-fp8",
            |l| l.tensor_mut("weight_scale").bytes.copy_from_slice(&f32::NAN.to_le_bytes()),
            "is NaN at [0, 0]",
        ),
        (
            "modelopt-fp8",
            |l| l.tensor_mut("weight").format = Format::U8,
            "is stored as U8, which is not what quant_algo FP8 stores",
        ),
        ("modelopt-fp8", |l| l.add("pre_quant_scale", Format::BF16, &[64], vec![0; 128]), "scales the layer's inputs"),
        ("modelopt-fp8-channel", |l| l.reshape("weight_scale", &[8]), "has shape [8], but [1, 1] is needed"),
        ("modelopt-nvfp4", |l| l.remove("weight_scale_2"), "no tensor named modelopt-nvfp4.weight_scale_2"),
        ("modelopt-nvfp4", |l| l.tensor_mut("weight_scale_2").bytes.fill(0), "is 0, but must be positive"),
        ("modelopt-nvfp4", |l| l.shape.1 = 63, "packs two values a byte, but the layer has 63 inputs"),
        ("fp8-block", |l| l.reshape("weight_scale_inv", &[3, 2]), "has shape [3, 2], but [3, 3] is needed"),
        ("fp8-block", |l| l.remove("weight_scale_inv"), "no tensor named fp8-block.weight_scale_inv"),
        (
            "fp8-block",
            |l| l.tensor_mut("weight_scale_inv").bytes[..4].copy_from_slice(&f32::INFINITY.to_le_bytes()),
            "is inf at [0, 0]",
        ),
        ("fp8-block", |l| l.tensor_mut("weight_scale_inv").bytes.fill(0), "is zero at [0, 0], where weights are not"),
        ("fp8-block-powers", |l| l.tensor_mut("weight_scale_inv").bytes[8] = 255, "is NaN at [2, 2]"),
    ]);
}

#[test]
fn configurations() {
    check(&[
        ("pack4-group", |l| l.config["quant_method"] = json!("squeeze"), "quant_method is \"squeeze\", but only "),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["format"] = json!("marlin-24"),
            "format is \"marlin-24\", but only pack-quantized",
        ),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["format"] = json!(4),
            "format is missing or no string",
        ),
        ("pack4-group", |l| l.config["config_groups"] = json!([]), "config_groups is missing or no object"),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"] = json!(["Linear"]),
            "config_groups.group_0 must be an object",
        ),
        ("pack4-group", |l| l.config["config_groups"]["group_0"]["targets"] = json!([]), "targets names no layer"),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["targets"] = json!(["re:(?=x)"]),
            "a pattern that is not read",
        ),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["targets"] = json!(["other"]),
            "no group of the configuration names the layer",
        ),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["targets"] = json!([1]),
            "targets holds 1, but must hold names",
        ),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["weights"] = json!(null),
            "group group_0 has no weights",
        ),
        (
            "pack4-group",
            |l| l.config["ignore"] = json!(["re:pack.*"]),
            "is quantized, but the configuration's ignore list names the layer",
        ),
        ("pack4-group", |l| l.config["ignore"] = json!("lm_head"), "ignore is \"lm_head\", but must be a list"),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["format"] = json!("dense"),
            "is quantized, but group group_0 is dense",
        ),
        (
            "pack4-group",
            |l| l.config["config_groups"]["group_0"]["format"] = json!("nvfp4-pack-quantized"),
            "asks for 4-bit int by Group(32), which its format does not hold",
        ),
        (
            "pack4-group",
            |l| l.config["sparsity_config"] = json!({"format": "sparse-24-bitmask"}),
            "sparsity_config.format is \"sparse-24-bitmask\"",
        ),
        ("pack4-group", |l| l.config["transform_config"] = json!({"config_groups": {"R1": {}}}), "rotates activations"),
        ("pack4-group", |l| l.weights("num_bits", json!(16)), "num_bits is 16, but must lie between 1 and 8"),
        ("pack4-group", |l| l.weights("num_bits", json!(8)), "is needed for 96 values of 8 bits"),
        ("pack4-group", |l| l.weights("type", json!("complex")), "type is \"complex\", but only"),
        ("pack4-group", |l| l.weights("type", json!("float")), "which its format does not hold"),
        ("pack4-group", |l| l.weights("symmetric", json!("yes")), "symmetric is \"yes\""),
        ("pack4-group", |l| l.weights("symmetric", json!(false)), "no tensor named pack4-group.weight_zero_point"),
        ("pack4-group", |l| l.weights("strategy", json!("token")), "strategy is \"token\", but only tensor, channel"),
        (
            "pack4-group",
            |l| l.weights("strategy", json!("block")),
            "block_structure must be two positive whole numbers",
        ),
        ("pack4-group", |l| l.weights("group_size", json!(0)), "group_size is 0, but must be -1 or from 1 to"),
        ("pack4-group", |l| l.weights("group_size", json!(1u64 << 40)), "group_size is 1099511627776"),
        ("pack4-group", |l| l.weights("group_size", json!(null)), "group_size is missing, but the strategy needs it"),
        ("pack4-group", |l| l.weights("group_size", json!(16)), "has shape [20, 3], but [20, 6] is needed"),
        ("float8-block", |l| l.weights("block_structure", json!([0, 32])), "block_structure must be two positive"),
        ("nvfp4", |l| l.weights("strategy", json!("channel")), "which its format does not hold"),
        ("modelopt-fp8", |l| l.config["quant_algo"] = json!("W4A16_AWQ"), "quant_algo is \"W4A16_AWQ\", but only FP8"),
        ("modelopt-fp8", |l| l.config["quant_algo"] = json!(null), "quant_algo is missing"),
        (
            "modelopt-fp8",
            |l| l.config["quant_algo"] = json!("NVFP4"),
            "is stored as F8_E4M3, which is not what quant_algo NVFP4 stores",
        ),
        ("modelopt-fp8", |l| l.config["ignore"] = json!(["modelopt*"]), "the configuration leaves out \"modelopt*\""),
        ("modelopt-fp8", |l| l.config["exclude_modules"] = json!(["*fp8"]), "the configuration leaves out \"*fp8\""),
        ("modelopt-nvfp4", |l| l.config["group_size"] = json!(0), "group_size is 0"),
        ("modelopt-nvfp4", |l| l.config["group_size"] = json!(32), "has shape [12, 4], but [12, 2] is needed"),
        (
            "fp8-block",
            |l| l.config["weight_block_size"] = json!([128]),
            "weight_block_size is [128], but must be two whole numbers",
        ),
        ("fp8-block", |l| l.config["weight_block_size"] = json!([0, 128]), "weight_block_size is [0,128]"),
        ("fp8-block", |l| l.config["weight_block_size"] = json!([128, 128]), "has shape [3, 3], but [1, 1] is needed"),
        ("fp8-block", |l| l.config["weight_block_size"] = json!(null), "has shape [3, 3], but [48, 1] is needed"),
        (
            "fp8-block",
            |l| l.config["modules_to_not_convert"] = json!(["fp8-block"]),
            "the configuration leaves out \"fp8-block\"",
        ),
        (
            "fp8-block",
            |l| l.config["modules_to_not_convert"] = json!({}),
            "modules_to_not_convert is {}, but must be a list",
        ),
    ]);
}

/// Layers that were excluded from quantization have a plain weight: no layout claims them.
#[test]
fn plain_layers_are_left_to_others() {
    for name in
        ["pack4-group", "int8-channel", "float8-channel", "nvfp4", "modelopt-fp8", "modelopt-nvfp4", "fp8-block"]
    {
        let mut layer = Layer::good(name);
        let packing = packing::open(&layer.config).unwrap().unwrap();
        layer.tensors.0.clear();
        layer.add("weight", Format::BF16, &[2, 2], vec![0; 8]);
        assert!(!packing.holds(&layer.tensors, name), "{name}");
        assert!(!packing.holds(&layer.tensors, "absent"), "{name}");
    }
}

/// Each layer is read by the group that names it most narrowly.
#[test]
fn groups_are_found_by_name_then_pattern_then_class() {
    let mut layer = Layer::good("pack4-group");
    let mut wrong = layer.config["config_groups"]["group_0"].clone();
    wrong["weights"]["group_size"] = json!(16);
    let right = layer.config["config_groups"]["group_0"].clone();
    for (right_target, wrong_target) in
        [("re:pack.*", "Linear"), ("pack4-group", "re:pack.*"), ("pack4-group", "Linear")]
    {
        for right_first in [true, false] {
            let (mut a, mut b) = (right.clone(), wrong.clone());
            a["targets"] = json!(["q_proj", right_target]);
            b["targets"] = json!([wrong_target, "other"]);
            let groups = if right_first { [a, b] } else { [b, a] };
            layer.config["config_groups"] = json!({"group_0": groups[0], "group_1": groups[1]});
            assert_eq!(layer.refusal(), None, "{right_target} against {wrong_target}");
        }
    }
}
