//! Tensors packed by gptqmodel and bitsandbytes are read, bit for bit, as those tools dequantize
//! them.
//!
//! Most tools round the result to f16 or bf16, while Folio's is exact. It is compared unrounded
//! with the tool's own code run in f32, and rounded with the tool's usual result.

mod faults;
mod made;

use folio_formats::{WeightSource, packing};
use folio_testing::fnv1a;
use half::{bf16, f16};
use made::golden;

fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    format!("{:016x}", fnv1a(bytes))
}

/// A value's bytes in the dtype of that name.
fn rounded(dtype: &str, value: f32) -> Vec<u8> {
    match dtype {
        "float16" => f16::from_f32(value).to_le_bytes().to_vec(),
        "bfloat16" => bf16::from_f32(value).to_le_bytes().to_vec(),
        "float32" => value.to_le_bytes().to_vec(),
        other => panic!("dtype {other}"),
    }
}

#[test]
fn weights_are_those_of_the_tools() {
    let (golden, source) = golden();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 51);
    let mut unread: Vec<String> = source.names().into_iter().map(str::to_owned).collect();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let [rows, cols] = ["rows", "cols"].map(|key| case[key].as_u64().unwrap() as usize);
        let packing = packing::open(&case["config"]).unwrap().unwrap();
        assert!(packing.holds(&source, name), "{name}");
        assert!(!packing.holds(&source, &format!("{name}-not-there")));
        let packed = packing.matrix(&source, name, rows, cols).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut all = Vec::new();
        let mut values = vec![0.0; cols];
        for row in 0..packed.matrix.num_rows() {
            packed.matrix.read_row(row, &mut values);
            all.extend_from_slice(&values);
        }
        let found = fnv(all.iter().flat_map(|value| value.to_le_bytes()));
        assert_eq!(found, case["exact"].as_str().unwrap(), "{name}: {:?}", &all[..8]);
        assert_eq!(all.len(), rows * cols, "{name}");
        let dtype = case["rounded_to"].as_str().unwrap();
        let found = fnv(all.iter().flat_map(|value| rounded(dtype, *value)));
        assert_eq!(found, case["rounded"].as_str().unwrap(), "{name} as {dtype}");
        unread.retain(|tensor| !packed.tensors.contains(tensor));
    }
    assert!(unread.is_empty(), "tensors that no case said it read: {unread:?}");
}
