//! Safetensors files and folders: files of the Python package are read, and broken ones are refused
//! by name.

mod common;

use common::*;
use folio_formats::{Format, Mapped, Safetensors, WeightSource};
use folio_testing::Folder;

#[test]
fn a_good_file_reads() {
    let file = open_safetensors(good_safetensors()).unwrap();
    assert_eq!(file.names(), ["a", "b", "c", "d"]);
    assert_eq!(file.metadata(), [("format".to_owned(), "pt".to_owned())]);
    let a = file.require("a").unwrap();
    assert_eq!((a.format, a.shape.as_slice(), a.bytes.len()), (Format::F32, [2, 3].as_slice(), 24));
    assert_eq!(file.tensor("d").unwrap().to_f32().unwrap(), [0.0]);
    assert!(file.tensor("c").is_none());
    let eight = file.require("c").unwrap_err().to_string();
    assert_eq!(eight, "some/model.bin: tensor c is stored as F8_E4M3FNUZ, which folio does not read");
    let missing = file.require("zz").unwrap_err().to_string();
    assert_eq!(missing, "some/model.bin: no tensor named zz");
    file.release("a");
}

#[test]
fn the_python_package_s_file_reads() {
    let bytes = include_bytes!("golden/python.safetensors");
    let file = Safetensors::from_map(Mapped::from_static("python.safetensors", bytes)).unwrap();
    let expect: serde_json::Value = serde_json::from_str(include_str!("golden/files.json")).unwrap();
    let expect = expect["safetensors"].as_object().unwrap();
    assert_eq!(file.names().len(), expect.len());
    for (name, about) in expect {
        let tensor = file.require(name).unwrap();
        assert_eq!(serde_json::json!(tensor.shape), about["shape"], "{name}");
        let values: Vec<f32> = serde_json::from_value(about["values"].clone()).unwrap();
        assert_eq!(tensor.to_f32().unwrap(), values, "{name}");
    }
}

/// A header with one tensor `t`.
fn one(dtype: &str, shape: &str, offsets: &str, data: usize) -> Vec<u8> {
    safetensors(&format!(r#"{{"t":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#), data)
}

/// A header with two F32 tensors at these offsets.
fn two(first: &str, second: &str, values: (usize, usize), data: usize) -> Vec<u8> {
    let (a, b) = values;
    let header = format!(
        r#"{{"a":{{"dtype":"F32","shape":[{a}],"data_offsets":{first}}},"b":{{"dtype":"F32","shape":[{b}],"data_offsets":{second}}}}}"#
    );
    safetensors(&header, data)
}

#[test]
fn broken_files_are_refused() {
    let twice =
        r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let dims = format!("[{}]", ["1"; 17].join(","));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("header length: expected 8 bytes, the file has 0", vec![]),
        ("header length: expected 8 bytes, the file has 7", vec![0; 7]),
        ("header length: 18446744073709551615 is more", vec![0xff; 16]),
        ("header length: 100000001 is more", 100_000_001u64.to_le_bytes().to_vec()),
        ("header length: 9, but the file ends 1 bytes later", [&9u64.to_le_bytes()[..], b"{"].concat()),
        ("header: not as expected: EOF", safetensors("", 0)),
        ("header: not as expected: ", safetensors("{", 0)),
        ("expected an object of tensors", safetensors("[]", 0)),
        ("header: not as expected: ", safetensors("{}x", 0)),
        ("header: not as expected: ", safetensors("\u{0}", 0)),
        ("\"t\" appears twice", safetensors(twice, 1)),
        ("\"k\" appears twice", safetensors(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0)),
        ("expected a string", safetensors(r#"{"__metadata__":{"k":1}}"#, 0)),
        ("missing field `dtype`", safetensors(r#"{"t":{}}"#, 0)),
        ("unknown field `extra`", safetensors(r#"{"t":{"extra":1}}"#, 0)),
        ("tensor t: unknown dtype \"Q4\"", one("\"Q4\"", "[1]", "[0,1]", 1)),
        ("expected a string", one("5", "[1]", "[0,1]", 1)),
        ("expected usize", one("\"U8\"", "[-1]", "[0,1]", 1)),
        ("expected usize", one("\"U8\"", "[1.5]", "[0,1]", 1)),
        ("at most 16 dimensions", one("\"U8\"", &dims, "[0,1]", 1)),
        ("expected u64", one("\"U8\"", "[1]", "[-1,1]", 1)),
        ("header: not as expected: ", one("\"U8\"", "[1]", "[0,1,2]", 1)),
        ("header: not as expected: ", one("\"U8\"", "[1]", "[0]", 1)),
        ("tensor t: data_offsets [1, 0] lie outside", one("\"U8\"", "[1]", "[1,0]", 1)),
        ("tensor t: data_offsets [0, 2] lie outside the 1 bytes", one("\"U8\"", "[2]", "[0,2]", 1)),
        ("tensor t: data_offsets [0, 18446744073709551615]", one("\"U8\"", "[1]", "[0,18446744073709551615]", 1)),
        ("tensor t: shape [2] of F32 needs 8 bytes, but has 4", one("\"F32\"", "[2]", "[0,4]", 4)),
        ("tensor t: shape [3] of F4 is 12 bits", one("\"F4\"", "[3]", "[0,2]", 2)),
        (
            "tensor t: shape [4294967296, 4294967296] has more values",
            one("\"F32\"", "[4294967296,4294967296]", "[0,4]", 4),
        ),
        ("tensor b: overlaps the one before it", two("[0,8]", "[4,12]", (2, 2), 12)),
        ("tensor b: leaves a hole before it", two("[0,8]", "[12,20]", (2, 2), 20)),
        ("tensor b: leaves a hole before it", two("[8,16]", "[4,8]", (2, 1), 16)),
        ("data: the tensors end at byte ", two("[0,8]", "[8,16]", (2, 2), 20)),
        ("data: the tensors end at byte 10, but the file has 11", safetensors("{}", 1)),
    ];
    for (expect, bytes) in cases {
        let problem = open_safetensors(bytes).expect_err(expect).to_string();
        assert!(problem.starts_with(NAME), "{problem}");
        assert!(problem.contains(expect), "expected {expect:?}, found {problem:?}");
    }
}

#[test]
fn odd_but_good_files_open() {
    open_safetensors(safetensors("{}", 0)).unwrap();
    open_safetensors(safetensors("{}      ", 0)).expect("headers are padded with spaces");
    open_safetensors(two("[8,16]", "[0,8]", (2, 2), 16)).expect("any order of names");
    let empty = open_safetensors(one("\"F32\"", "[0,4]", "[0,0]", 0)).unwrap();
    assert!(empty.require("t").unwrap().to_f32().unwrap().is_empty());
    let wide = open_safetensors(one("\"F32\"", "[0,18446744073709551615]", "[0,0]", 0)).unwrap();
    assert!(wide.require("t").unwrap().to_f32().is_err(), "a row that no memory can hold");
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = good_safetensors();
    for length in 0..whole.len() {
        let problem = open_safetensors(whole[..length].to_vec()).expect_err("cut").to_string();
        assert!(problem.starts_with(NAME), "{problem}");
    }
}

/// The tensors of the folder with this index, or why it is refused.
fn indexed(folder: &Folder, map: &str) -> String {
    folder.write("model.safetensors.index.json", format!(r#"{{"metadata":{{}},"weight_map":{map}}}"#));
    Safetensors::open(folder).map_or_else(|problem| problem.to_string(), |model| model.names().join(" "))
}

#[test]
fn folders_and_shards() {
    let folder = Folder::new("shards");
    assert!(Safetensors::open(&folder).unwrap_err().to_string().contains("model.safetensors: No such file"));
    folder.write("model.safetensors", good_safetensors());
    assert_eq!(Safetensors::open(&folder).unwrap().names().len(), 4);

    folder.write("s1", two("[0,4]", "[4,8]", (1, 1), 8));
    folder.write("s2", one("\"U8\"", "[1]", "[0,1]", 1));
    let check = |map: &str, expect: &str| {
        let found = indexed(&folder, map);
        assert!(found.contains(expect), "{map}: expected {expect:?}, found {found:?}");
    };
    assert_eq!(indexed(&folder, r#"{"t":"s2","b":"s1","a":"s1"}"#), "a b t");
    assert_eq!(indexed(&folder, r#"{"t":"s2","b":"s1"}"#), "b t", "the index decides what is shown");
    check(r#"{"t":"s3"}"#, "index.json: weight_map: lists shard s3, which is not in the folder");
    check(r#"{"t":"s1"}"#, "index.json: tensor t: the index says it is in s1, but it is not there");
    check(r#"{"t":"../s2"}"#, "weight_map: \"../s2\" is listed for tensor t: not a file of this folder");
    for escape in ["/etc/passwd", "..", ".", "", "a/b", "s2/", "./s2", "..\\\\s2"] {
        check(&format!(r#"{{"t":"{escape}"}}"#), "not a file of this folder");
    }
    check(r#"{"t":"s2","t":"s2"}"#, "index: not as expected: \"t\" appears twice");
    check("{}", "weight_map: lists no tensor");
    check("[]", "index: not as expected");
    check(r#"{"t":5}"#, "index: not as expected");
    folder.write("s2", b"");
    check(r#"{"t":"s2"}"#, "s2: header length: expected 8 bytes");
}
