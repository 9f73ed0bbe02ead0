//! The structs that travel from Rust to a kernel are declared twice, in Rust and in CUDA. This test
//! reads both declarations and compares names, types, offsets and sizes of their fields. Both
//! compilers check the size once more: Rust by a constant, NVRTC by a `static_assert`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Structs of the libraries that CUDA code does not see.
const FOREIGN: &[&str] = &["Algorithm", "Heuristic", "UniqueId"];

/// A declared struct: its file, its text between the braces, and the text of the whole file.
struct Declared {
    file: String,
    body: String,
    source: String,
}

type Structs = BTreeMap<String, Declared>;

#[derive(Debug, PartialEq, Eq)]
struct Field {
    name: String,
    kind: String,
    offset: usize,
    bytes: usize,
}

struct Layout {
    fields: Vec<Field>,
    bytes: usize,
    align: usize,
}

#[test]
fn structs_of_kernels_are_the_same_on_both_sides() {
    let rust = rust_structs();
    let cuda = cuda_structs();
    let mut compared = Vec::new();
    for (name, host) in &rust {
        if FOREIGN.contains(&name.as_str()) {
            continue;
        }
        let device = cuda.get(name).unwrap_or_else(|| panic!("{name} of {} has no struct in CUDA", host.file));
        let (of_rust, of_cuda) = (rust_layout(&rust, name), cuda_layout(&cuda, name));
        assert_eq!(of_rust.fields, of_cuda.fields, "{name} in {} and in {}", host.file, device.file);
        assert_eq!(of_rust.bytes, of_cuda.bytes, "bytes of {name}");
        let bytes = of_rust.bytes;
        let constant = format!("assert!(size_of::<{name}>() == {bytes})");
        assert!(host.source.contains(&constant), "{} lacks `const _: () = {constant};`", host.file);
        let check = format!("sizeof({name}) == {bytes}");
        assert!(device.source.contains(&check), "{} lacks static_assert({check})", device.file);
        compared.push(name.as_str());
    }
    assert!(compared.len() >= 15, "only {compared:?} were found");
}

/// The state of a sampled row is opaque to Rust, which allocates it.
#[test]
fn the_state_of_a_sampled_row_has_the_bytes_that_are_allocated() {
    let cuda = cuda_structs();
    let bytes = super::sampling::STATE_BYTES;
    assert_eq!(cuda_layout(&cuda, "SampleState").bytes, bytes);
    assert!(cuda["SampleState"].source.contains(&format!("sizeof(SampleState) == {bytes}")));
}

/// A moved or narrowed field changes what is compared.
#[test]
fn a_drifted_struct_is_seen() {
    let parse = |body: &str| {
        let mut structs = Structs::new();
        declare(&mut structs, "x.cuh", &format!("struct X {{\n{body}\n}};\n"), 0, "\n};");
        cuda_layout(&structs, "X")
    };
    let whole = parse("const float* a; // a list\n i32 b, c;\n u32 d[2 * 3];");
    assert_eq!(whole.bytes, 40);
    assert_eq!(whole.fields[3], Field { name: "d".into(), kind: "u32".into(), offset: 16, bytes: 24 });
    assert_ne!(parse("const float* a; i32 c, b; u32 d[6];").fields, whole.fields);
    assert_ne!(parse("const float* a; i32 b; float c; u32 d[6];").fields, whole.fields);
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda"))
}

fn rust_structs() -> Structs {
    let mut structs = Structs::new();
    for (file, source) in sources(folder(), &["rs"]) {
        for (at, _) in source.match_indices("\n#[repr(C)]\n") {
            declare(&mut structs, &file, &source, at, "\n}");
        }
    }
    structs
}

fn cuda_structs() -> Structs {
    let mut structs = Structs::new();
    for (file, source) in sources(&folder().join("kernels"), &["cu", "cuh"]) {
        for (at, _) in source.match_indices("\nstruct ") {
            declare(&mut structs, &file, &source, at, "\n};");
        }
    }
    structs
}

/// Files below `folder` by their paths in it, in order.
fn sources(folder: &Path, endings: &[&str]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).expect("a folder of sources") {
            let path = entry.expect("an entry of a folder").path();
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            if path.is_dir() {
                folders.push(path);
            } else if endings.contains(&ending) && !path.ends_with("mirrors.rs") {
                let name = path.strip_prefix(folder).expect("a path in the folder").to_string_lossy();
                found.insert(name.into_owned(), fs::read_to_string(&path).expect("a source file"));
            }
        }
    }
    found
}

/// Adds the first struct behind `at`, whose body ends before `end`.
fn declare(structs: &mut Structs, file: &str, source: &str, at: usize, end: &str) {
    let after = source[at..].split_once("struct ").expect("a struct").1;
    let name: String = after.chars().take_while(|c| c.is_alphanumeric()).collect();
    let (head, rest) = after.split_once('{').expect("the fields of a struct");
    // A tuple struct has no named fields: the comparison then fails unless it is a foreign one.
    let body = if head.trim() == name { rest.split_once(end).expect("the end of a struct").0 } else { "" };
    let body = body.lines().map(|line| line.split("//").next().unwrap_or_default());
    let body = body.collect::<Vec<_>>().join(" ");
    structs.insert(name, Declared { file: file.into(), body, source: source.into() });
}

fn rust_layout(structs: &Structs, name: &str) -> Layout {
    let declared = &structs[name];
    let mut layout = Layout { fields: Vec::new(), bytes: 0, align: 1 };
    for field in split_fields(&declared.body, ',') {
        let field = field.rsplit("pub(super)").next().unwrap_or_default().trim();
        let field = field.strip_prefix("pub ").unwrap_or(field);
        let (name, kind) = field.split_once(':').expect("a field `name: type`");
        let kind = kind.trim();
        let (kind, count) = match kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
            Some(array) => {
                let (kind, count) = array.split_once(';').expect("an array `[type; count]`");
                (kind.trim(), product(count, &declared.source, "const", ": usize ="))
            }
            None => (kind, 1),
        };
        let kind = match kind {
            "f32" => "float",
            "f64" => "double",
            kind => kind,
        };
        layout.push(name.trim(), kind, count, |kind| rust_layout(structs, kind));
    }
    layout.finish()
}

fn cuda_layout(structs: &Structs, name: &str) -> Layout {
    let declared = &structs[name];
    let mut layout = Layout { fields: Vec::new(), bytes: 0, align: 1 };
    for declaration in split_fields(&declared.body, ';') {
        let declaration = declaration.trim().trim_start_matches("const ");
        let (kind, names) = declaration.split_once(' ').expect("a field `type name`");
        // An address is a number on the host.
        let kind = if kind.ends_with('*') { "u64" } else { kind };
        for name in names.split(',') {
            let (name, count) = match name.trim().strip_suffix(']').and_then(|name| name.split_once('[')) {
                Some((name, count)) => (name, product(count, &declared.source, "#define", "")),
                None => (name.trim(), 1),
            };
            layout.push(name, kind, count, |kind| cuda_layout(structs, kind));
        }
    }
    layout.finish()
}

fn split_fields(body: &str, between: char) -> impl Iterator<Item = &str> {
    body.split(between).map(str::trim).filter(|field| !field.is_empty())
}

/// The value of `3 * COUNT`, with constants that `source` declares.
fn product(text: &str, source: &str, before: &str, between: &str) -> usize {
    text.split('*').map(|factor| number(factor.trim(), source, before, between)).product()
}

fn number(text: &str, source: &str, before: &str, between: &str) -> usize {
    if let Ok(number) = text.replace('_', "").parse() {
        return number;
    }
    let declared = format!("{before} {text}{between} ");
    let value = source.split_once(&declared).unwrap_or_else(|| panic!("no `{declared}`")).1;
    let digits: String = value.chars().take_while(|c| c.is_ascii_digit() || *c == '_').collect();
    digits.replace('_', "").parse().expect("a number")
}

impl Layout {
    fn push(&mut self, name: &str, kind: &str, count: usize, inner: impl Fn(&str) -> Layout) {
        let (bytes, align) = match kind {
            "u32" | "i32" | "float" => (4, 4),
            "u64" | "i64" | "double" => (8, 8),
            kind => {
                let inner = inner(kind);
                (inner.bytes, inner.align)
            }
        };
        let offset = self.bytes.next_multiple_of(align);
        self.fields.push(Field { name: name.into(), kind: kind.into(), offset, bytes: bytes * count });
        self.bytes = offset + bytes * count;
        self.align = self.align.max(align);
    }

    fn finish(mut self) -> Layout {
        let filled: usize = self.fields.iter().map(|field| field.bytes).sum();
        self.bytes = self.bytes.next_multiple_of(self.align);
        // Padding is a field with a name, so that no byte is left undefined.
        assert_eq!(self.bytes, filled, "a hole between {:?}", self.fields);
        self
    }
}
