//! The safetensors writer: its output reads back, in one file or many, and an interrupted run looks
//! like no model.

use std::path::Path;

use folio_formats::safetensors::Writer;
use folio_formats::{Safetensors, WeightSource};
use folio_testing::Folder;

fn bytes(seed: u8, count: usize) -> Vec<u8> {
    (0..count).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Name, dtype, shape, bytes.
type Row = (&'static str, &'static str, Vec<usize>, Vec<u8>);

fn tensors() -> Vec<Row> {
    vec![
        ("model.a.weight", "BF16", vec![4, 8], bytes(1, 64)),
        ("model.a.weight_scale", "F8_E4M3", vec![4, 2], bytes(2, 8)),
        ("model.b.weight_packed", "I32", vec![2, 8], bytes(3, 64)),
        ("model.b.weight_shape", "I64", vec![2], bytes(4, 16)),
        ("model.c.weight", "I8", vec![16, 8], bytes(5, 128)),
        ("empty", "F32", vec![0, 3], vec![]),
    ]
}

fn write(folder: &Path, shard_bytes: u64, tensors: &[Row]) -> folio_formats::safetensors::Written {
    let mut writer = Writer::create(folder, shard_bytes).unwrap();
    for (name, dtype, shape, bytes) in tensors {
        writer.tensor(name, dtype, shape, bytes).unwrap();
    }
    writer.finish().unwrap()
}

fn check(folder: &Path, tensors: &[Row]) {
    let read = Safetensors::open(folder).unwrap();
    assert_eq!(read.names().len(), tensors.len());
    assert_eq!(read.metadata(), [("format".to_owned(), "pt".to_owned())]);
    for (name, dtype, shape, bytes) in tensors {
        let stored = read.stored(name).unwrap();
        assert_eq!((stored.dtype, &stored.shape, stored.bytes), (*dtype, shape, bytes.as_slice()), "{name}");
    }
}

#[test]
fn one_file_reads_back() {
    let folder = Folder::new("one");
    let written = write(&folder, 1 << 20, &tensors());
    assert_eq!((written.bytes, written.num_tensors), (280, 6));
    assert_eq!(folder.names(), ["model.safetensors"]);
    check(&folder, &tensors());
}

#[test]
fn shards_are_small_enough_and_listed() {
    let folder = Folder::new("many");
    let written = write(&folder, 100, &tensors());
    // 64 + 8, 64 + 16, a tensor that is larger than the shard limit, and the empty one, for which
    // no room was left.
    assert_eq!(written.files.len(), 4);
    let names: Vec<String> = (1..=3).map(|n| format!("model-{n:05}-of-00004.safetensors")).collect();
    assert_eq!(written.files[..3], names);
    assert_eq!(folder.names().len(), 5);
    check(&folder, &tensors());
    let index = std::fs::read_to_string(folder.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 280);
    assert_eq!(index["weight_map"]["model.b.weight_shape"], written.files[1]);
}

#[test]
fn odd_lengths_do_not_push_others_off_their_alignment() {
    let folder = Folder::new("odd");
    let odd: Vec<Row> = vec![
        ("a", "U8", vec![3], bytes(1, 3)),
        ("b", "F32", vec![2], bytes(2, 8)),
        ("c", "BF16", vec![1], bytes(3, 2)),
        ("d", "I64", vec![1], bytes(4, 8)),
    ];
    write(&folder, 1 << 20, &odd);
    check(&folder, &odd);
    let read = Safetensors::open(&folder).unwrap();
    assert_eq!(read.names(), ["d", "b", "c", "a"]);
}

#[test]
fn half_a_job_is_no_model() {
    let folder = Folder::new("half");
    let mut writer = Writer::create(&folder, 100).unwrap();
    for (name, dtype, shape, bytes) in &tensors()[..5] {
        writer.tensor(name, dtype, shape, bytes).unwrap();
    }
    drop(writer);
    assert!(Safetensors::open(&folder).is_err());
    assert!(folder.names().iter().all(|name| name.ends_with(".part")), "{:?}", folder.names());
    // The same folder can be used again.
    write(&folder, 1 << 20, &tensors());
    check(&folder, &tensors());
}

#[test]
#[should_panic(expected = "added twice")]
fn names_are_given_once_even_across_shards() {
    let folder = Folder::new("twice");
    let mut writer = Writer::create(&folder, 1).unwrap();
    for _ in 0..2 {
        writer.tensor("t", "U8", &[1], &[0]).unwrap();
    }
}
