//! The cache of packed weights beside the model: whether there is one, its key, and when it is
//! written.
//!
//! The key covers the names, sizes and times of the weight files, the configuration beside them,
//! their format after loading, and the version of Folio and of its layout. It does not notice a
//! model's file changed in place to the same size with its time set back. The shapes of the parts
//! are compared when the packed file is opened, and its contents while the first step runs; a
//! damaged file is removed, and the model loaded again from its own weights.

use std::path::Path;
use std::sync::Arc;

use folio_device::cpu::{LAYOUT_VERSION, Packed, PackedFile, PackedParts, PackedPlace, PackedWriter, PartShape};
use folio_formats::Mapped;
use folio_model::{AtLoad, Digest, OpenModel, file_stamp};

use crate::assets::Assets;
use crate::model_ref::ModelRef;
use crate::options::{Options, PackedCacheMode, Warn};
use crate::target::Target;

/// Smaller ones are packed in hardly any time.
const LEAST_BYTES: u64 = 256 << 20;
/// Name of the folder beside the model.
const FOLDER: &str = ".folio";
/// Files that describe how a folder's tensors are to be read.
const CONFIGURATION: [&str; 3] = ["config.json", "hf_quant_config.json", "model.safetensors.index.json"];

/// The cache file of a model's packed weights, if it exists.
pub struct PackedCache {
    place: PackedPlace,
    found: Option<Arc<Mapped>>,
    /// Smaller weights are not cached.
    least: u64,
}

impl PackedCache {
    /// None if nothing is cached: by the flag, on a GPU, for models in the binary, and if each
    /// memory node has its own weights.
    pub fn find(assets: &Assets, options: &Options, target: &Target) -> Option<Self> {
        let Target::Cpu(cpu) = target else { return None };
        let least = match options.packed_cache {
            PackedCacheMode::Auto => LEAST_BYTES,
            PackedCacheMode::On => 0,
            PackedCacheMode::Off => return None,
        };
        if cpu.has_memory_nodes() {
            return None;
        }
        let mut place = place(assets.place(), assets.model.at_load)?;
        place.key = with_settings(place.key, &assets.overrides().about_weights());
        let found = place.open();
        let cache = Self { place, found, least };
        cache.prepare(&assets.model);
        Some(cache)
    }

    /// Prefetches the packed weights instead of the model's own, if they exist.
    pub fn prepare(&self, model: &OpenModel) {
        if let Some(found) = &self.found {
            model.weights.rest();
            found.fetch_all();
        }
    }

    /// For a model with these parts; none if they are too small to be cached.
    pub fn weights(self, parts: &[PartShape]) -> Option<PackedWeights> {
        let Self { place, found, least } = self;
        if parts.iter().map(PartShape::bytes).sum::<u64>() < least {
            return None;
        }
        let file = found.and_then(|map| PackedFile::new(map, place.key, parts));
        let packed = match file {
            Some(file) => {
                file.begin_check();
                Packed::File(Arc::new(file))
            }
            None => Packed::Shared(PackedParts::default()),
        };
        Some(PackedWeights { place, packed })
    }
}

/// Packed weights of one session: read from the cache, or to be written to it.
pub struct PackedWeights {
    place: PackedPlace,
    packed: Packed,
}

impl PackedWeights {
    /// The source for the next load; none if it must pack, because the file is damaged. That file
    /// is removed then, and `warn` receives a message.
    pub fn supply(&self, warn: Option<Warn>) -> Option<Packed> {
        let warn = |line: std::fmt::Arguments<'_>| warn.into_iter().for_each(|warn| warn(line));
        let file = match &self.packed {
            Packed::File(file) if file.is_damaged() => file,
            packed => return Some(packed.clone()),
        };
        let path = file.path().display();
        match self.place.remove(file) {
            Ok(()) => warn(format_args!(
                "{path} is damaged and was removed: the model's own weights are packed in its place, and the next start writes it anew"
            )),
            Err(error) => warn(format_args!(
                "{path} is damaged and cannot be removed ({error}): the model's own weights are packed in its place; delete the file"
            )),
        }
        None
    }

    /// Starts to write them, unless they came from the file.
    pub fn keep(&self, warn: Option<Warn>) -> Option<PackedWriter> {
        let Packed::Shared(parts) = &self.packed else { return None };
        let folder = self.place.folder.clone();
        let failed = move |error| {
            if let Some(warn) = warn {
                warn(format_args!("packed weights are not kept in {}: {error}", folder.display()));
            }
        };
        // Without a thread they are not cached.
        self.place.clone().write(parts, failed).ok()
    }
}

fn place(model: &ModelRef, at_load: Option<AtLoad>) -> Option<PackedPlace> {
    let (path, folder) = match model {
        ModelRef::Embedded => return None,
        ModelRef::Folder(path) => (path, path.as_path()),
        ModelRef::Gguf(path) => (path, path.parent()?),
    };
    // A folder may be called `.`.
    let named = if path.is_dir() { path.canonicalize().ok()? } else { path.clone() };
    let name = named.file_name()?.to_string_lossy().into_owned();
    Some(PackedPlace { folder: folder.join(FOLDER), name, key: key(path, at_load) })
}

/// The key of a model with settings in place of its configuration's.
fn with_settings(key: u128, settings: &str) -> u128 {
    if settings.is_empty() {
        return key;
    }
    let mut digest = Digest::new("folio packed weights with settings");
    digest.update(&key.to_le_bytes());
    digest.field(settings.as_bytes());
    digest.finish()
}

fn key(path: &Path, at_load: Option<AtLoad>) -> u128 {
    let mut digest = Digest::new("folio packed weights");
    digest.update(&LAYOUT_VERSION.to_le_bytes());
    digest.field(env!("CARGO_PKG_VERSION").as_bytes());
    digest.field(at_load.map_or("", AtLoad::name).as_bytes());
    digest.field(file_stamp(path).as_bytes());
    // A model of several files is named by its first, with the others beside it.
    let is_one_of_many = path.file_name().is_some_and(|name| name.to_string_lossy().contains("-of-"));
    let beside = path.parent().filter(|_| is_one_of_many && !path.is_dir());
    let beside = beside.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
    digest.field(beside.map(file_stamp).unwrap_or_default().as_bytes());
    for name in CONFIGURATION {
        digest.field(&std::fs::read(path.join(name)).unwrap_or_default());
    }
    digest.finish()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    /// A folder that is removed with the value.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("folio-packed-cache-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("writable");
            Self(path)
        }

        fn write(&self, name: &str, content: &str) {
            std::fs::write(self.0.join(name), content).expect("writable");
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_lie_beside_the_model_and_the_binary_has_none() {
        let folder = Folder::new("place");
        folder.write("model.gguf", "weights");
        let found = place(&ModelRef::Gguf(folder.0.join("model.gguf")), None).expect("a place");
        assert_eq!((found.folder, found.name.as_str()), (folder.0.join(".folio"), "model.gguf"));
        let found = place(&ModelRef::Folder(folder.0.join(".")), None).expect("a place");
        assert_eq!(found.folder, folder.0.join(".").join(".folio"));
        assert_eq!(Some(found.name.as_str()), folder.0.file_name().and_then(|name| name.to_str()));
        assert_eq!(place(&ModelRef::Embedded, None), None);
    }

    #[test]
    fn whatever_decides_the_packed_bytes_changes_the_key() {
        let folder = Folder::new("key");
        let shards = ["model-00001-of-00002", "model-00002-of-00002"];
        for shard in shards {
            folder.write(&format!("{shard}.gguf"), shard);
            folder.write(&format!("{shard}.safetensors"), shard);
        }
        folder.write("config.json", "{}");
        let first = folder.0.join("model-00001-of-00002.gguf");
        let keys = || [key(&folder.0, None), key(&first, None), key(&first, Some(AtLoad::Int8))];
        let mut seen = keys().to_vec();
        assert_eq!(keys().to_vec(), seen, "as long as nothing changes");
        let mut changed = |what: &str, which: &[usize]| {
            for &at in which {
                assert!(!seen.contains(&keys()[at]), "{what} does not change key {at}");
            }
            seen.extend(keys());
        };
        folder.write("model-00002-of-00002.gguf", "another one");
        changed("a second file", &[1, 2]);
        folder.write("model-00002-of-00002.safetensors", "another one");
        changed("a second shard", &[0]);
        folder.write("config.json", r#"{"tie_word_embeddings": true}"#);
        changed("a configuration", &[0]);
        let file = std::fs::File::options().write(true).open(&first).expect("it is there");
        file.set_modified(SystemTime::now() + Duration::from_nanos(5_000_000)).expect("a time can be set");
        changed("a time", &[1, 2]);
        assert_eq!(key(&first, None), key(&first, None));
        assert_ne!(key(&first, Some(AtLoad::Int4)), key(&first, Some(AtLoad::Int8)));
        let keys = ["", "{\"a\":1}", "{\"a\":2}"].map(|settings| with_settings(key(&first, None), settings));
        assert!(keys[0] == key(&first, None) && keys[0] != keys[1] && keys[1] != keys[2], "settings are part of it");
    }
}
