//! GGUF files: files of the Python package are read, and broken ones are refused with the file and
//! the field named.

mod common;

use common::*;
use folio_formats::gguf::{Array, Entry, FileWriter, Value, Writer};
use folio_formats::{Error, Format, Gguf, WeightSource};
use folio_testing::Folder;

#[test]
fn a_written_file_reads_back() {
    let gguf = open_gguf(good_gguf()).unwrap();
    let meta = gguf.metadata();
    assert_eq!(meta.str("general.architecture").unwrap(), "llama");
    assert_eq!(meta.u32("t.u8").unwrap(), 1);
    assert_eq!(meta.get::<i32>("t.i64").unwrap(), -4);
    assert_eq!(meta.f32("t.f64").unwrap(), 0.25);
    assert!(meta.bool("t.bool").unwrap());
    assert_eq!(meta.strings("t.strings").unwrap(), ["a", "", "ccc"]);
    assert_eq!(meta.get::<&[f32]>("t.floats").unwrap(), [1.0, 2.0]);
    assert_eq!(meta.get::<Vec<usize>>("t.counts").unwrap(), [3, 4]);
    assert_eq!(meta.array("t.nested").unwrap().len(), 2);
    assert_eq!(meta.find::<u32>("absent").unwrap(), None);
    assert_eq!(gguf.names(), ["norm", "matrix", "blocks"]);
    let matrix = gguf.require("matrix").unwrap();
    assert_eq!((matrix.format, matrix.shape.as_slice()), (Format::BF16, [2, 5].as_slice()));
    assert_eq!(gguf.tensor("norm").unwrap().to_f32().unwrap(), [-8.0, -7.75, -7.5]);
    assert_eq!(gguf.tensor("blocks").unwrap().bytes.len(), 68);
    gguf.release("blocks");
    assert!(gguf.tensor("absent").is_none());
    let missing = gguf.require("absent").unwrap_err().to_string();
    assert_eq!(missing, "some/model.bin: no tensor named absent");
}

#[test]
fn getters_name_the_key() {
    let gguf = open_gguf(good_gguf()).unwrap();
    let meta = gguf.metadata();
    let check = |found: folio_formats::Result<()>, expect: &str| {
        assert_eq!(found.unwrap_err().to_string(), format!("{NAME}: metadata key {expect}"));
    };
    check(meta.u32("absent").map(drop), "absent: missing, expected an integer of 32 bits, not negative");
    check(meta.u32("t.i32").map(drop), "t.i32: expected an integer of 32 bits, not negative, found -3");
    check(meta.u32("t.f32").map(drop), "t.f32: expected an integer of 32 bits, not negative, found f32");
    check(meta.f32("t.u8").map(drop), "t.u8: expected a float, found 1");
    check(meta.str("t.bool").map(drop), "t.bool: expected a string, found a bool");
    check(meta.strings("t.floats").map(drop), "t.floats: expected an array of strings, found an array of f32");
    check(meta.find::<bool>("t.u8").map(drop), "t.u8: expected a bool, found 1");
}

#[test]
fn the_python_package_s_file_reads() {
    let gguf = Gguf::from_static("python.gguf", include_bytes!("golden/python.gguf")).unwrap();
    let expect: serde_json::Value = serde_json::from_str(include_str!("golden/files.json")).unwrap();
    let value = |key: &str| gguf.metadata().value(key).unwrap().clone();
    assert_eq!(value("general.architecture"), Value::from("llama"));
    assert_eq!(value("t.u8"), Value::U8(200));
    assert_eq!(value("t.i8"), Value::I8(-100));
    assert_eq!(value("t.u16"), Value::U16(60000));
    assert_eq!(value("t.i16"), Value::I16(-30000));
    assert_eq!(value("t.u32"), Value::U32(4_000_000_000));
    assert_eq!(value("t.i32"), Value::I32(-2_000_000_000));
    assert_eq!(value("t.u64"), Value::U64(1 << 60));
    assert_eq!(value("t.i64"), Value::I64(-(1 << 60)));
    assert_eq!(value("t.f32"), Value::F32(0.1));
    assert_eq!(value("t.f64"), Value::F64(0.1));
    assert_eq!(value("t.bool"), Value::Bool(true));
    assert_eq!(value("t.string"), Value::from("grün 🦀"));
    assert_eq!(gguf.metadata().strings("t.strings").unwrap(), ["a", "", "ccc"]);
    assert_eq!(gguf.metadata().get::<Vec<i32>>("t.ints").unwrap(), [1, -2, 3]);
    assert_eq!(gguf.metadata().get::<&[f32]>("t.floats").unwrap(), [0.5, 1.5]);
    let nested = Array::Array(vec![Array::I32(vec![1, 2]), Array::I32(vec![3])]);
    assert_eq!(value("t.nested"), Value::Array(nested));
    for (name, shape) in [("plain", [2, 3]), ("half", [2, 4]), ("blocks", [4, 64])] {
        let tensor = gguf.require(name).unwrap();
        assert_eq!(tensor.shape, shape, "{name}");
        let values: Vec<f32> = serde_json::from_value(expect["gguf"][name].clone()).unwrap();
        assert_eq!(tensor.to_f32().unwrap(), values, "{name}");
    }
}

#[test]
fn a_tensor_that_cannot_be_decoded_is_an_error_when_asked_for() {
    let raw = RawGguf { tensors: tensor("t", &[256], 16, 0), data: 66, ..RawGguf::default() };
    let gguf = open_gguf(raw.bytes()).unwrap();
    assert!(gguf.tensor("t").is_none());
    let problem = gguf.require("t").unwrap_err();
    assert_eq!(problem.to_string(), "some/model.bin: tensor t is stored as IQ2_XXS, which folio does not read");
}

/// A file with this metadata and no tensor.
fn keys(num_keys: u64, keys: &[Vec<u8>]) -> Vec<u8> {
    let (keys, tensors) = (keys.concat(), vec![]);
    RawGguf { num_keys, keys, num_tensors: 0, tensors, align: 1, data: 0, ..RawGguf::default() }.bytes()
}

/// A file with these tensors and `data` bytes for them.
fn tensors(lines: &[Vec<u8>], data: usize) -> Vec<u8> {
    RawGguf { num_tensors: lines.len() as u64, tensors: lines.concat(), data, ..RawGguf::default() }.bytes()
}

fn aligned(to: u32) -> Vec<u8> {
    keys(1, &[key("general.alignment", 4, &to.to_le_bytes())])
}

#[test]
fn broken_files_are_refused() {
    let ok = |raw: RawGguf| raw.bytes();
    let long = "x".repeat(600);
    let deep = [array(9, 1).repeat(8), array(4, 0)].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("magic: needs 4 bytes, but the file ends after 0", vec![]),
        ("magic: needs 4 bytes, but the file ends after 3", b"GGU".to_vec()),
        ("magic: expected GGUF, found \"GGML\"", ok(RawGguf { magic: *b"GGML", ..RawGguf::default() })),
        ("version: needs 4 bytes", b"GGUF\x03".to_vec()),
        ("version: 1 is too old", ok(RawGguf { version: 1, ..RawGguf::default() })),
        ("version: expected 2 or 3, found 4", ok(RawGguf { version: 4, ..RawGguf::default() })),
        ("version: the file is big endian", ok(RawGguf { version: 3u32.swap_bytes(), ..RawGguf::default() })),
        ("tensor count: needs 8 bytes", b"GGUF\x03\0\0\0\x01".to_vec()),
        ("tensor count: 18446744073709551615", ok(RawGguf { num_tensors: u64::MAX, ..RawGguf::default() })),
        ("tensor count: 200001 is more", ok(RawGguf { num_tensors: 200_001, ..RawGguf::default() })),
        ("metadata count: needs 8 bytes", RawGguf::default().bytes()[..20].to_vec()),
        ("metadata count: 65537 is more", keys(65_537, &[])),
        ("metadata: key 0 of 1: needs 8 bytes", keys(1, &[])),
        ("metadata: key 0 of 1: a string of 18446744073709551615 bytes", keys(1, &[vec![0xff; 8]])),
        ("metadata: key 0 of 1: needs 60000 bytes", keys(1, &[60_000u64.to_le_bytes().to_vec()])),
        ("metadata: key 0 of 1: a string is not UTF-8", keys(1, &[string(b"\xff\xfe")])),
        ("metadata key k: needs 4 bytes", keys(1, &[string(b"k")])),
        ("metadata key k: unknown value type 13", keys(1, &[key("k", 13, &[0; 8])])),
        ("metadata key k: needs 8 bytes", keys(1, &[key("k", 10, &[0; 3])])),
        ("metadata key k: expected a bool, found the byte 2", keys(1, &[key("k", 7, &[2])])),
        ("metadata key k: needs 99 bytes", keys(1, &[key("k", 8, &99u64.to_le_bytes())])),
        ("metadata key k: needs 18446744073709551615 bytes", keys(1, &[key("k", 8, &[0xff; 8])])),
        ("metadata key k: a string is not UTF-8", keys(1, &[key("k", 8, &string(b"\xc3"))])),
        ("metadata key k: unknown array element type 99", keys(1, &[key("k", 9, &array(99, 1))])),
        ("metadata key k: an array of 1099511627776 elements", keys(1, &[key("k", 9, &array(4, 1 << 40))])),
        ("metadata key k: an array of 18446744073709551615 elements", keys(1, &[key("k", 9, &array(0, u64::MAX))])),
        ("metadata key k: an array of 4611686018427387905 elements", keys(1, &[key("k", 9, &array(4, (1 << 62) + 1))])),
        ("metadata key k: an array of 9 elements", keys(1, &[key("k", 9, &[array(8, 9), vec![0; 64]].concat())])),
        ("metadata key k: an array of 9 elements", keys(1, &[key("k", 9, &[array(9, 9), vec![0; 96]].concat())])),
        ("metadata key k: an array of 9 elements", keys(1, &[key("k", 9, &[array(7, 9), vec![0; 1]].concat())])),
        ("metadata key k: arrays nested more than 8 deep", keys(1, &[key("k", 9, &deep)])),
        ("metadata key k: appears twice", keys(2, &[key("k", 0, &[1]), key("k", 0, &[1])])),
        ("general.alignment: expected a power of two up to 4096, found 0", aligned(0)),
        ("general.alignment: expected a power of two up to 4096, found 48", aligned(48)),
        ("general.alignment: expected a power of two up to 4096, found 8192", aligned(8192)),
        ("general.alignment: expected an integer", keys(1, &[key("general.alignment", 8, &string(b"32"))])),
        ("tensor table: name of tensor 0 of 1: a string of 600 bytes", tensors(&[tensor(&long, &[4], 0, 0)], 16)),
        (
            "tensor table: name of tensor 1 of 2: ",
            ok(RawGguf { num_tensors: 2, align: 1, data: 0, ..RawGguf::default() }),
        ),
        ("tensor t: expected at most 4 dimensions, found 5", tensors(&[tensor("t", &[1; 5], 0, 0)], 16)),
        ("tensor t: expected at most 4 dimensions, found 1431", tensors(&[[string(b"t"), vec![0x55; 4]].concat()], 16)),
        ("tensor t: unknown tensor type 4", tensors(&[tensor("t", &[4], 4, 0)], 16)),
        ("tensor t: unknown tensor type 1000", tensors(&[tensor("t", &[4], 1000, 0)], 16)),
        ("tensor t: shape [0, 4] holds no values", tensors(&[tensor("t", &[4, 0], 0, 0)], 16)),
        ("tensor t: rows of 16 values are not whole blocks of 32 of Q4_0", tensors(&[tensor("t", &[16, 2], 2, 0)], 18)),
        ("tensor t: shape [4294967296, 4294967296] needs more", tensors(&[tensor("t", &[1 << 32; 2], 0, 0)], 16)),
        ("tensor t: shape [4611686018427387904] needs more", tensors(&[tensor("t", &[1 << 62], 0, 0)], 16)),
        ("tensor t: offset 8 is not a multiple of the alignment 32", tensors(&[tensor("t", &[1], 0, 8)], 64)),
        ("tensor t: 20 bytes at offset 0 end beyond the 16 bytes", tensors(&[tensor("t", &[5], 0, 0)], 16)),
        ("tensor t: 4 bytes at offset 64 end beyond the 64 bytes", tensors(&[tensor("t", &[1], 0, 64)], 64)),
        ("tensor t: 4 bytes at offset 18446744073709551584", tensors(&[tensor("t", &[1], 0, u64::MAX - 31)], 64)),
        ("tensor t: appears twice", tensors(&[tensor("t", &[1], 0, 0), tensor("t", &[1], 0, 32)], 64)),
        ("tensor u: overlaps tensor t", tensors(&[tensor("t", &[9], 0, 0), tensor("u", &[1], 0, 32)], 64)),
        ("tensor t: overlaps tensor u", tensors(&[tensor("t", &[1], 0, 32), tensor("u", &[16], 0, 0)], 64)),
    ];
    for (expect, bytes) in cases {
        let problem = open_gguf(bytes).expect_err(expect).to_string();
        assert!(problem.starts_with(NAME), "{problem}");
        assert!(problem.contains(expect), "expected {expect:?}, found {problem:?}");
    }
}

#[test]
fn version_2_and_odd_but_good_files_open() {
    open_gguf(RawGguf::default().bytes()).unwrap();
    open_gguf(RawGguf { version: 2, ..RawGguf::default() }.bytes()).unwrap();
    open_gguf(tensors(&[tensor("scalar", &[], 0, 0)], 4)).unwrap();
    let touching = tensors(&[tensor("b", &[8], 0, 32), tensor("a", &[8], 0, 0)], 64);
    assert_eq!(open_gguf(touching).unwrap().names(), ["b", "a"]);
    let deep = [array(9, 1).repeat(7), array(4, 0)].concat();
    open_gguf(keys(1, &[key("k", 9, &deep)])).unwrap();
    let wide = RawGguf {
        num_keys: 1,
        keys: key("general.alignment", 4, &4096u32.to_le_bytes()),
        align: 4096,
        ..RawGguf::default()
    };
    assert_eq!(open_gguf(wide.bytes()).unwrap().tensor("t").unwrap().bytes.len(), 16);
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = good_gguf();
    let used = whole.len() - (96usize - 68);
    for length in 0..used {
        let problem = open_gguf(whole[..length].to_vec()).expect_err("cut").to_string();
        assert!(problem.starts_with(NAME), "{problem}");
    }
    open_gguf(whole[..used].to_vec()).expect("only padding is missing");
}

#[test]
fn parts_open_as_one_model() {
    let folder = Folder::new("gguf-parts");
    let part = |number: u16, name: &str| {
        let mut writer = folio_formats::gguf::Writer::new();
        writer.set("split.count", 2u16).set("split.no", number).tensor(name, Format::F32, &[1], vec![0; 4]);
        writer.to_vec()
    };
    let first = folder.join("m-00001-of-00002.gguf");
    let second = folder.join("m-00002-of-00002.gguf");
    std::fs::write(&first, part(0, "a")).unwrap();
    assert!(matches!(Gguf::open(&first), Err(Error::Io { path, .. }) if path == second));
    std::fs::write(&second, part(1, "b")).unwrap();
    assert_eq!(Gguf::open(&first).unwrap().names(), ["a", "b"]);
    assert_eq!(Gguf::open(&second).unwrap().names(), ["a", "b"]);
    std::fs::write(&second, part(1, "a")).unwrap();
    let twice = Gguf::open(&first).unwrap_err().to_string();
    assert!(twice.contains("m-00002-of-00002.gguf: tensor a: is in an earlier part too"), "{twice}");
    let alone = folder.join("alone.gguf");
    std::fs::write(&alone, part(0, "a")).unwrap();
    let named = Gguf::open(&alone).unwrap_err().to_string();
    assert!(named.contains("split.count: 2 parts, but the file is not named"), "{named}");
}

#[test]
fn tensor_by_tensor_gives_the_same_file() {
    let folder = Folder::new("gguf-stream");
    let path = folder.join("model.gguf");
    let (a, b) = (vec![7u8; 34 * 3], vec![9u8; 12]);
    let mut whole = Writer::new();
    whole.set("general.architecture", "llama");
    whole.tensor("a", Format::Q8_0, &[3, 32], &a).tensor("b", Format::F32, &[3], &b);
    let entries = vec![Entry::new("a", Format::Q8_0, &[3, 32]), Entry::new("b", Format::F32, &[3])];
    let metadata = [("general.architecture".to_owned(), Value::from("llama"))];
    let mut parts = FileWriter::create(&path, &metadata, entries).unwrap();
    parts.tensor("a", &a).unwrap();
    assert!(!path.exists(), "half a file bears another name");
    parts.tensor("b", &b).unwrap();
    parts.finish().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), whole.to_vec());
}
