//! Packed layers against the tools that packed them: `tests/golden/quantized`, made by packings.py
//! there.

mod faults;
mod made;

use folio_formats::packing::{self, Packed};
use folio_formats::{ActivationScale, Error, Format, WeightSource};
use folio_testing::fnv1a;
use half::{bf16, f16};
use made::source;
use serde_json::Value;

fn fnv(values: &[f32]) -> String {
    format!("{:016x}", fnv1a(values.iter().flat_map(|value| value.to_le_bytes())))
}

/// The tool's final values; minus zero, which tools treat differently, counts as zero.
fn values(packed: &Packed<'_>, dtype: &str) -> Vec<f32> {
    let (rows, cols) = (packed.matrix.num_rows(), packed.matrix.cols());
    let mut values = vec![0.0; rows * cols];
    for (row, values) in values.chunks_exact_mut(cols).enumerate() {
        packed.matrix.read_row(row, values);
    }
    let rounded = |value: f32| match dtype {
        "BF16" => bf16::from_f32(value).to_f32(),
        "F16" => f16::from_f32(value).to_f32(),
        _ => value,
    };
    values.into_iter().map(|value| rounded(value) + 0.0).collect()
}

struct Case {
    name: String,
    shape: (usize, usize),
    config: Value,
    about: Value,
}

fn cases() -> Vec<Case> {
    let golden = made::golden();
    let case = |row: &Value| Case {
        name: row["name"].as_str().unwrap().to_owned(),
        shape: (row["rows"].as_u64().unwrap() as usize, row["cols"].as_u64().unwrap() as usize),
        config: row["config"].clone(),
        about: row.clone(),
    };
    golden["cases"].as_array().unwrap().iter().map(case).collect()
}

impl Case {
    fn read<'a>(&self, source: &'a dyn WeightSource) -> Result<Packed<'a>, Error> {
        let packing = packing::open(&self.config)?.expect("a packing");
        assert!(packing.holds(source, &self.name), "{}", self.name);
        packing.matrix(source, &self.name, self.shape.0, self.shape.1)
    }
}

#[test]
fn values_have_the_bits_of_the_tools() {
    let source = source(made::tensors());
    let mut failures = Vec::new();
    let cases = cases();
    for case in &cases {
        let packed = case.read(&source).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let values = values(&packed, case.about["dtype"].as_str().unwrap());
        for sample in case.about["samples"].as_array().unwrap() {
            let (at, bits) = (sample[0].as_u64().unwrap() as usize, sample[1].as_u64().unwrap() as u32);
            if values[at].to_bits() != bits {
                failures.push(format!("{}: value {at} is {}, not {}", case.name, values[at], f32::from_bits(bits)));
            }
        }
        if fnv(&values) != case.about["hash"].as_str().unwrap() {
            failures.push(format!("{}: some value differs", case.name));
        }
        let mut names: Vec<&str> = source.names();
        names.retain(|name| name.strip_prefix(&case.name).is_some_and(|rest| rest.starts_with('.')));
        names.sort_unstable();
        assert_eq!(packed.tensors, names, "{}: every tensor is given back", case.name);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(cases.len() >= 39, "{} cases", cases.len());
}

/// The check can fail: a flipped bit of any layer's codes shows.
#[test]
fn a_flipped_bit_shows() {
    for case in cases() {
        let clean = source(made::tensors());
        let suffix =
            if clean.tensor(&format!("{}.weight_packed", case.name)).is_some() { "weight_packed" } else { "weight" };
        let view = clean.tensor(&format!("{}.{suffix}", case.name)).unwrap();
        let middle = view.bytes.len() / 2 / 4 * 4;
        let at = view.bytes.as_ptr() as usize - clean.tensor(clean.names()[0]).unwrap().bytes.as_ptr() as usize;
        let mut bytes = made::tensors();
        let all = clean.names().into_iter().map(|name| clean.tensor(name).unwrap().bytes.len()).sum::<usize>();
        let first = bytes.len() - all;
        bytes[first + at + middle] ^= 1;
        let packed =
            case.read(&source(bytes)).map(|packed| fnv(&values(&packed, case.about["dtype"].as_str().unwrap())));
        assert_ne!(packed.ok().as_deref(), case.about["hash"].as_str(), "{}", case.name);
    }
}

#[test]
fn eight_bit_floats_are_torch_s() {
    let golden = made::golden();
    for (name, expected) in golden["eight_bit_floats"].as_object().unwrap() {
        let format = Format::from_safetensors(name).unwrap();
        let codes: Vec<u8> = (0..=255).collect();
        let mut values = [0.0; 256];
        format.decode(&codes, &mut values);
        for (code, (value, expected)) in values.iter().zip(expected.as_array().unwrap()).enumerate() {
            match expected.as_u64() {
                Some(bits) => assert_eq!(u64::from(value.to_bits()), bits, "{name} {code}: {value}"),
                None => assert!(value.is_nan(), "{name} {code}: {value}"),
            }
        }
    }
}

/// Layers of one checkpoint in different formats; the plain ones are left to the loader.
#[test]
fn activations_by_row_are_asked_for_where_both_sides_are_bytes() {
    let source = source(made::tensors());
    for case in cases() {
        let packed = case.read(&source).unwrap();
        let asked = packed.matrix.parts()[0].coding().is_some_and(|coding| coding.activations == ActivationScale::Row);
        let expect = case.name.starts_with("int8-");
        assert_eq!(asked, expect, "{}", case.name);
    }
}
