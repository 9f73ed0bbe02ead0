//! compressed-tensors' `quantization_config`: groups of layers, and the storage of each group's
//! weights.

use serde_json::Value;

use super::super::fp8::block_size;
use super::super::patterns::{Target, names};
use super::super::scales::Sharing;
use super::super::{scheme, short};
use crate::Result;
use crate::error::shown;

/// Most groups of layers, and most values that may share a scale: far above any real configuration.
const MAX_GROUPS: usize = 10_000;
const MAX_GROUP_SIZE: i64 = 1 << 20;

/// Layers that are stored alike.
#[derive(Debug)]
pub(super) struct Group {
    pub name: String,
    pub targets: Vec<Target>,
    pub storage: Storage,
    /// `None` if only activations are quantized.
    pub weights: Option<Weights>,
    /// Whether activations shall be eight-bit integers with one scale per token.
    pub row_activations: bool,
}

/// The `format` of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// Integers in 32-bit words.
    Words,
    /// One number per byte, integer or float.
    Bytes,
    Nvfp4,
    Mxfp4,
    Mxfp8,
    /// The layer's weight is not packed at all.
    Dense,
}

/// The `weights` of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub bits: usize,
    pub float: bool,
    pub symmetric: bool,
    pub sharing: Sharing,
}

const STORAGES: &[(&str, Storage)] = &[
    ("pack-quantized", Storage::Words),
    ("int-quantized", Storage::Bytes),
    ("float-quantized", Storage::Bytes),
    ("naive-quantized", Storage::Bytes),
    ("nvfp4-pack-quantized", Storage::Nvfp4),
    ("mxfp4-pack-quantized", Storage::Mxfp4),
    ("mxfp8-quantized", Storage::Mxfp8),
    ("dense", Storage::Dense),
];

pub(super) fn groups(config: &Value) -> Result<Vec<Group>> {
    refuse_what_changes_the_sums(config)?;
    let Some(Value::Object(groups)) = config.get("config_groups") else {
        return Err(scheme("config_groups", "is missing or no object"));
    };
    if groups.len() > MAX_GROUPS {
        return Err(scheme("config_groups", format!("has {} groups, but at most {MAX_GROUPS} are read", groups.len())));
    }
    groups.iter().map(|(name, group)| read_group(config, &shown(name), group)).collect()
}

/// Sparse storage and rotations of activations are not supported: a layer read without them would
/// be wrong.
fn refuse_what_changes_the_sums(config: &Value) -> Result<()> {
    let sparse = config.pointer("/sparsity_config/format").and_then(Value::as_str);
    if let Some(format) = sparse.filter(|format| *format != "dense") {
        return Err(scheme("sparsity_config.format", format!("is \"{}\", which is not read", shown(format))));
    }
    match config.pointer("/transform_config/config_groups") {
        Some(Value::Object(groups)) if !groups.is_empty() => {
            Err(scheme("transform_config", "rotates activations, which is not supported"))
        }
        _ => Ok(()),
    }
}

fn read_group(config: &Value, name: &str, group: &Value) -> Result<Group> {
    let field = |inner: &str| format!("config_groups.{name}.{inner}");
    if !group.is_object() {
        return Err(scheme(&format!("config_groups.{name}"), "must be an object"));
    }
    let storage = read_storage(config, &field("format"), group)?;
    let targets = names(group, "targets")?.into_iter().map(|text| {
        let unread = || scheme(&field("targets"), format!("holds \"{}\", a pattern that is not read", shown(&text)));
        Target::read(&text).ok_or_else(unread)
    });
    let targets = targets.collect::<Result<Vec<_>>>()?;
    if targets.is_empty() {
        return Err(scheme(&field("targets"), "names no layer"));
    }
    let weights = match group.get("weights") {
        None | Some(Value::Null) => None,
        Some(weights) => Some(read_weights(weights, storage, &field("weights"))?),
    };
    let inputs = group.get("input_activations").unwrap_or(&Value::Null);
    let row_activations = inputs.get("num_bits").and_then(Value::as_u64) == Some(8)
        && inputs.get("type").and_then(Value::as_str).is_none_or(|kind| kind == "int");
    Ok(Group { name: name.to_owned(), targets, storage, weights, row_activations })
}

fn read_storage(config: &Value, field: &str, group: &Value) -> Result<Storage> {
    // `mixed-precision` for the whole means that each group has its own format.
    let own = group.get("format").filter(|format| !format.is_null());
    let (field, format) = match own {
        Some(format) => (field, Some(format)),
        None => ("format", config.get("format")),
    };
    let Some(text) = format.and_then(Value::as_str) else { return Err(scheme(field, "is missing or no string")) };
    let known = STORAGES.iter().find(|(name, _)| *name == text);
    known.map(|(_, storage)| *storage).ok_or_else(|| {
        let names: Vec<&str> = STORAGES.iter().map(|(name, _)| *name).collect();
        scheme(field, format!("is \"{}\", but only {} are read", shown(text), names.join(", ")))
    })
}

fn read_weights(weights: &Value, storage: Storage, field: &str) -> Result<Weights> {
    let at = |inner: &str| format!("{field}.{inner}");
    let of = |inner: &str| weights.get(inner).filter(|value| !value.is_null());
    let unread = |inner: &str, value: &Value, expect: &str| {
        Err(scheme(&at(inner), format!("is {}, but {expect}", short(value))))
    };
    let bits = match of("num_bits") {
        None => 8,
        Some(value) => match value.as_u64() {
            Some(bits @ 1..=8) => bits as usize,
            _ => return unread("num_bits", value, "must lie between 1 and 8"),
        },
    };
    let float = match of("type") {
        None => false,
        Some(value) => match value.as_str() {
            Some("int") => false,
            Some("float") => true,
            _ => return unread("type", value, "only \"int\" and \"float\" are read"),
        },
    };
    let symmetric = match of("symmetric") {
        None => true,
        Some(Value::Bool(symmetric)) => *symmetric,
        Some(value) => return unread("symmetric", value, "must be true or false"),
    };
    let weights = Weights { bits, float, symmetric, sharing: read_sharing(weights, field)? };
    check_storage(&weights, storage, field)?;
    Ok(weights)
}

/// The strategy; without one it follows from the group size.
fn read_sharing(weights: &Value, field: &str) -> Result<Sharing> {
    let at = |inner: &str| format!("{field}.{inner}");
    let of = |inner: &str| weights.get(inner).filter(|value| !value.is_null());
    let size = match of("group_size") {
        None => None,
        Some(value) => match value.as_i64() {
            Some(size) if size == -1 || (1..=MAX_GROUP_SIZE).contains(&size) => Some(size),
            _ => {
                let problem = format!("is {}, but must be -1 or from 1 to {MAX_GROUP_SIZE}", short(value));
                return Err(scheme(&at("group_size"), problem));
            }
        },
    };
    let strategy = match (of("strategy"), size) {
        (Some(value), _) => value.as_str().unwrap_or_default(),
        (None, None) => "tensor",
        (None, Some(-1)) => "channel",
        (None, Some(_)) => "group",
    };
    match (strategy, size) {
        ("tensor", _) => Ok(Sharing::Tensor),
        ("channel", _) => Ok(Sharing::Row),
        ("group" | "tensor_group", Some(size @ 1..)) => Ok(Sharing::Group(size as usize)),
        ("group" | "tensor_group", _) => Err(scheme(&at("group_size"), "is missing, but the strategy needs it")),
        ("block", _) => match of("block_structure").and_then(block_size) {
            Some((rows, cols)) => Ok(Sharing::Block { rows, cols }),
            None => Err(scheme(&at("block_structure"), "must be two positive whole numbers")),
        },
        _ => {
            let known = "tensor, channel, group, tensor_group, block";
            Err(scheme(&at("strategy"), format!("is \"{}\", but only {known} are read", shown(strategy))))
        }
    }
}

/// Checks that storage and numbers match.
fn check_storage(weights: &Weights, storage: Storage, field: &str) -> Result<()> {
    let fits = match storage {
        Storage::Words => !weights.float,
        Storage::Bytes => !weights.float || weights.bits == 8 && weights.symmetric,
        Storage::Nvfp4 | Storage::Mxfp4 => weights.float && weights.bits == 4 && weights.symmetric,
        Storage::Mxfp8 => weights.float && weights.bits == 8 && weights.symmetric,
        Storage::Dense => true,
    };
    let grouped = matches!(weights.sharing, Sharing::Group(_));
    let block = matches!(weights.sharing, Sharing::Block { .. });
    let shared = match storage {
        Storage::Nvfp4 | Storage::Mxfp4 | Storage::Mxfp8 => grouped,
        Storage::Words => !block,
        Storage::Bytes => !block || weights.symmetric,
        Storage::Dense => true,
    };
    if fits && shared {
        return Ok(());
    }
    let Weights { bits, float, symmetric, sharing } = weights;
    let kind = if *float { "float" } else { "int" };
    let zeros = if *symmetric { "" } else { " with zero points" };
    Err(scheme(field, format!("asks for {bits}-bit {kind}{zeros} by {sharing:?}, which its format does not hold")))
}
