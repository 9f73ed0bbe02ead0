//! Files that are truncated or written to between the reading of their headers and the end of a
//! load.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use super::*;

/// A copy of a model's file, removed with the value.
struct Copy(PathBuf);

impl Copy {
    fn new() -> Self {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/folio-rust-7m.gguf");
        let path = std::env::temp_dir().join(format!("folio-changed-{}.gguf", std::process::id()));
        std::fs::copy(from, &path).unwrap();
        Self(path)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Without the signal handler the first of these ends the process.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_changes_while_it_is_loaded_is_an_error_with_its_name() {
    type Change = fn(&mut File) -> std::io::Result<()>;
    let changes: [(&str, Change); 3] = [
        ("truncated", |file| file.set_len(1 << 20)),
        ("emptied", |file| file.set_len(0)),
        ("written to", |file| file.write_all(b"GGUF").and_then(|()| file.set_modified(std::time::SystemTime::now()))),
    ];
    for (what, change) in changes {
        let copy = Copy::new();
        let mut file = File::options().write(true).open(&copy.0).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let model = crate::open(&copy.0).unwrap();
        load_model(Reference::new(), &model).unwrap();
        change(&mut file).unwrap();
        let told =
            load_model(Reference::new(), &model).err().unwrap_or_else(|| panic!("{what} and loaded")).to_string();
        assert!(
            told.contains(copy.0.to_str().unwrap()) && told.contains("changed while it was read"),
            "{what}: {told}"
        );
    }
}
