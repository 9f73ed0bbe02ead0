//! Stored weights come back bit for bit; incomplete, foreign and outdated files are refused.

use std::borrow::Cow;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;

use folio_formats::{Digest, Format, Matrix};

use super::super::weight::{Weight, packed_parts};
use super::super::{Ctx, Isa, Pool};
use super::write::check_room;
use super::*;

/// A folder that is removed when the value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("folio-packed-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn place(&self) -> PackedPlace {
        PackedPlace { folder: self.0.join(".folio"), name: "model.gguf".into(), key: 0x0123_4567 }
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.join(".folio")).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Random bytes in which all floats are finite.
fn matrix(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
    let mut state = 7u64;
    let mut byte = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as u8 & 0x3f
    };
    let bytes = format.bytes_for(cols as u64).unwrap();
    let rows = (0..rows).map(|_| Cow::Owned((0..bytes).map(|_| byte()).collect())).collect();
    Matrix::from_rows(format, cols, rows).unwrap()
}

const FORMATS: [Format; 4] = [Format::BF16, Format::Q4_K, Format::Q8_0, Format::F32];

fn matrices() -> Vec<Matrix<'static>> {
    FORMATS.into_iter().enumerate().map(|(at, format)| matrix(format, 40 + at, 256)).collect()
}

fn shapes() -> Vec<PartShape> {
    shapes_of(&matrices())
}

fn shapes_of(matrices: &[Matrix<'_>]) -> Vec<PartShape> {
    matrices.iter().flat_map(|matrix| packed_parts(matrix).unwrap()).collect()
}

/// Every weight's values, from memory or from a file.
fn load(packed: &Packed, matrices: &[Matrix<'_>]) -> Vec<Vec<f32>> {
    let pool = Pool::new(2).unwrap();
    let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
    let mut supply = Supply::new(packed);
    let values = |matrix: &Matrix<'_>| {
        let weight = Weight::pack(ctx, &mut supply, matrix).unwrap();
        let mut values = vec![0.0; weight.outputs() * weight.inputs()];
        let rows = values.chunks_exact_mut(weight.inputs()).enumerate();
        rows.for_each(|(output, row)| weight.read_output(output, row));
        values
    };
    matrices.iter().map(values).collect()
}

fn packed() -> PackedParts {
    let parts = PackedParts::default();
    load(&Packed::Shared(parts.clone()), &matrices());
    parts
}

/// Writes, and waits for the result.
fn write(place: &PackedPlace) -> io::Result<()> {
    write_those(place, &packed())
}

fn write_those(place: &PackedPlace, parts: &PackedParts) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    let _writer = place.clone().write(parts, move |error| sender.send(error).unwrap()).unwrap();
    receiver.recv().map_or(Ok(()), Err)
}

fn write_matrices(place: &PackedPlace, matrices: &[Matrix<'_>]) {
    let parts = PackedParts::default();
    load(&Packed::Shared(parts.clone()), matrices);
    write_those(place, &parts).unwrap();
}

fn open(place: &PackedPlace) -> Option<PackedFile> {
    PackedFile::new(place.open()?, place.key, &shapes())
}

#[test]
fn a_file_gives_what_was_packed_and_reads_no_source() {
    let folder = Folder::new("round");
    let place = folder.place();
    assert!(open(&place).is_none());
    let expected = load(&Packed::Shared(PackedParts::default()), &matrices());
    write(&place).unwrap();
    let file = Packed::File(Arc::new(open(&place).unwrap()));
    let zeros = FORMATS.into_iter().enumerate().map(|(at, format)| {
        let row = Cow::Owned(vec![0; format.bytes_for(256).unwrap() as usize]);
        Matrix::from_rows(format, 256, vec![row; 40 + at]).unwrap()
    });
    assert_eq!(load(&file, &zeros.collect::<Vec<_>>()), expected);
    assert_eq!(folder.names(), ["model.gguf-00000000000000000000000001234567.packed"]);
}

#[test]
fn a_file_that_is_not_as_expected_is_left_alone_and_repaired() {
    let folder = Folder::new("damaged");
    let place = folder.place();
    write(&place).unwrap();
    let good = fs::read(place.path()).unwrap();
    let check = |bytes: &[u8], what: &str| {
        fs::write(place.path(), bytes).unwrap();
        assert!(open(&place).is_none_or(|file| file.check().is_err()), "{what}");
    };
    // A file this small is sampled completely, except between the parts.
    let header = 80 + 40 * FORMATS.len();
    for at in (0..header).chain((header.next_multiple_of(64)..good.len()).step_by(977)) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        check(&bad, &format!("byte {at} of {} flipped", good.len()));
    }
    for len in [0, 1, 63, header, good.len() / 2, good.len() - 1] {
        check(&good[..len], &format!("cut to {len}"));
    }
    check(&[&good[..], &[0]].concat(), "a byte more");
    check(&vec![0; good.len()], "never written");
    write(&place).unwrap();
    assert_eq!(fs::read(place.path()).unwrap(), good, "repaired");

    let map = || place.open().unwrap();
    assert!(PackedFile::new(map(), place.key, &shapes()).is_some());
    assert!(PackedFile::new(map(), place.key + 1, &shapes()).is_none(), "another key");
    let changes: [fn(&mut Vec<PartShape>); 5] = [
        |shapes| shapes.truncate(3),
        |shapes| shapes.push(shapes[0]),
        |shapes| shapes.swap(0, 1),
        // Other shapes with the same number of bytes.
        |shapes| shapes[0].outputs += 1,
        |shapes| shapes[0].inputs -= 1,
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut other = shapes();
        change(&mut other);
        assert!(PackedFile::new(map(), place.key, &other).is_none(), "other shapes, {at}");
    }
}

#[test]
fn whatever_hinders_a_file_is_told_once_and_leaves_nothing() {
    let folder = Folder::new("hindered");
    fs::create_dir_all(&folder.0).unwrap();
    fs::write(folder.0.join(".folio"), b"a file where the folder should be").unwrap();
    assert!(write(&folder.place()).is_err());
    fs::remove_file(folder.0.join(".folio")).unwrap();

    let (shapes, parts): (Vec<_>, Vec<_>) = packed().take().into_iter().unzip();
    let ended = folder.place().write_now(&shapes, &parts, &AtomicBool::new(true)).unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::Interrupted);
    assert!(folder.names().is_empty(), "{:?}", folder.names());

    assert_eq!(check_room(&folder.0, u64::MAX).unwrap_err().kind(), ErrorKind::StorageFull);
    check_room(&folder.0, 0).unwrap();
}

/// Large enough that most of it lies between the pages that are sampled when it is opened.
fn large() -> [Matrix<'static>; 2] {
    [matrix(Format::BF16, 1500, 1024), matrix(Format::Q8_0, 3000, 1024)]
}

#[test]
fn damage_anywhere_is_found_at_the_first_check_and_by_every_later_one() {
    let folder = Folder::new("anywhere");
    let place = folder.place();
    let shapes = shapes_of(&large());
    write_matrices(&place, &large());
    let good = fs::read(place.path()).unwrap();
    let open = || PackedFile::new(place.open().unwrap(), place.key, &shapes);
    let whole = open().unwrap();
    whole.begin_check();
    whole.check().unwrap();
    whole.check().unwrap();
    assert!(!whole.is_damaged());

    let mut unseen = 0;
    for at in (120..good.len()).step_by(good.len() / 97) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        // The damage arrives in a new file, as from a disk or a bad copy.
        fs::remove_file(place.path()).unwrap();
        fs::write(place.path(), &bad).unwrap();
        let Some(file) = open() else { continue };
        unseen += 1;
        // With a background reader, and without.
        if at % 2 == 0 {
            file.begin_check();
        }
        let told = file.check().unwrap_err().to_string();
        assert!(told.contains("damaged") && told.contains(place.path().to_str().unwrap()), "byte {at}: {told}");
        assert!(file.is_damaged() && file.check().is_err(), "byte {at}: for good");
    }
    assert!(unseen > 50, "{unseen} of 97 places are not looked at when it is opened");
    whole.check().expect("who has the old file mapped has what was written");
}

/// A file changes while it is in use.
#[cfg(target_os = "linux")]
#[test]
fn a_file_in_use_is_looked_at_again_when_it_was_written_to() {
    let folder = Folder::new("in-use");
    let place = folder.place();
    write_matrices(&place, &large());
    let good = fs::read(place.path()).unwrap();
    let shapes = shapes_of(&large());
    let earlier = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
    let check = |what: &str, change: &dyn Fn(&mut fs::File) -> io::Result<()>, stays_good: bool| {
        let _ = fs::remove_file(place.path());
        fs::write(place.path(), &good).unwrap();
        // The time is set back, so that the change has another time however soon it comes.
        let mut disk = fs::File::options().read(true).write(true).open(place.path()).unwrap();
        disk.set_modified(earlier).unwrap();
        let file = PackedFile::new(place.open().unwrap(), place.key, &shapes).unwrap();
        file.begin_check();
        file.check().unwrap();
        change(&mut disk).unwrap();
        assert_eq!(file.check().is_ok(), stays_good, "{what}");
        // The bytes are restored, but the wrong ones may have been read in between.
        if !stays_good {
            fs::write(place.path(), &good).unwrap();
            assert!(file.check().is_err(), "{what}, and undone");
            place.remove(&file).unwrap();
            assert!(!place.path().exists(), "{what}: removed");
        }
    };
    use std::os::unix::fs::FileExt;
    check("touched", &|disk| disk.set_modified(std::time::SystemTime::now()), true);
    check("removed", &|_| fs::remove_file(place.path()), true);
    check("a byte", &|disk| disk.write_all_at(&[good[9999] ^ 1], 9999), false);
    check("truncated", &|disk| disk.set_len(4096), false);
    check("emptied", &|disk| disk.set_len(0), false);
    check("longer", &|disk| disk.set_len(good.len() as u64 + 1), true);
}

#[test]
fn a_file_that_was_put_in_the_place_of_a_damaged_one_stays() {
    let folder = Folder::new("replaced");
    let place = folder.place();
    write(&place).unwrap();
    let old = open(&place).unwrap();
    let good = fs::read(place.path()).unwrap();
    let other = place.path().with_extension("new");
    fs::write(&other, &good).unwrap();
    fs::rename(&other, place.path()).unwrap();
    place.remove(&old).unwrap();
    assert_eq!(fs::read(place.path()).unwrap(), good);
    place.remove(&open(&place).unwrap()).unwrap();
    assert!(!place.path().exists());
}

#[test]
fn what_is_out_of_date_goes_and_what_others_have_stays() {
    let folder = Folder::new("clear");
    let place = folder.place();
    fs::create_dir_all(&place.folder).unwrap();
    let (old, current) = ("model.gguf-000000000000000000000000000000ff.packed", place.path());
    let current = current.file_name().unwrap().to_str().unwrap();
    let busy = format!("{current}.8-9.partial");
    let left = [old.into(), format!("{current}.1-2.partial"), format!("{old}.3-4.partial")];
    let stay = ["model.gguf-b-000000000000000000000000000000ff.packed", "other.gguf-00.packed", "model.gguf-notes"];
    for name in left.iter().map(String::as_str).chain(stay).chain([busy.as_str()]) {
        fs::write(place.folder.join(name), b"x").unwrap();
    }
    let held = fs::File::open(place.folder.join(&busy)).unwrap();
    held.lock().unwrap();
    write(&place).unwrap();
    let mut expected: Vec<&str> = stay.into_iter().chain([current, busy.as_str()]).collect();
    expected.sort_unstable();
    assert_eq!(folder.names(), expected);
}

#[test]
fn two_writers_at_once_leave_one_good_file() {
    let folder = Folder::new("two");
    let place = folder.place();
    let (sender, receiver) = mpsc::channel::<io::Error>();
    let writers: Vec<PackedWriter> = (0..2)
        .map(|_| {
            let sender = sender.clone();
            place.clone().write(&packed(), move |error| sender.send(error).unwrap()).unwrap()
        })
        .collect();
    drop(sender);
    // Waits until both writers have ended.
    let failed: Vec<io::Error> = receiver.iter().collect();
    drop(writers);
    // One may find its unfinished file removed, if the other came before it had locked it.
    assert!(failed.len() < 2, "{failed:?}");
    assert!(open(&place).is_some());
    assert_eq!(folder.names().len(), 1, "{:?}", folder.names());
}

#[test]
fn parts_are_shared_once() {
    let parts = PackedParts::default();
    let shared = Packed::Shared(parts.clone());
    load(&shared, &matrices()[..2]);
    load(&shared, &matrices());
    assert_eq!(parts.shapes(), shapes(), "of the last load alone");
    assert_eq!(parts.take().len(), FORMATS.len());
    load(&shared, &matrices());
    assert!(parts.shapes().is_empty());
}

/// The packed bytes of all formats when [`LAYOUT_VERSION`] was last raised. If this test fails on
/// purpose, raise it again: earlier files would give wrong weights.
#[test]
fn packed_bytes_are_those_of_this_version() {
    let mut found = String::new();
    let pool = Pool::new(1).unwrap();
    for &format in Format::ALL {
        let matrix = matrix(format, 35, 256);
        let digests = Isa::available().into_iter().filter_map(|isa| {
            let parts = PackedParts::default();
            let mut supply = Supply::new(&Packed::Shared(parts.clone()));
            Weight::pack(Ctx { pool: &pool, isa }, &mut supply, &matrix).ok()?;
            let mut digest = Digest::new("test");
            for (shape, part) in parts.take() {
                digest.field(format!("{shape:?}").as_bytes());
                digest.field(&part.data);
                part.factors.iter().for_each(|factor| digest.update(&factor.to_le_bytes()));
            }
            Some(digest.finish() as u64)
        });
        let digests: Vec<u64> = digests.collect();
        assert!(
            digests.windows(2).all(|pair| pair[0] == pair[1]),
            "{format:?}: keys do not tell instruction sets apart"
        );
        if let Some(digest) = digests.first() {
            found.push_str(&format!("{format:?} {digest:016x}\n"));
        }
    }
    assert_eq!(format!("version {LAYOUT_VERSION}\n{found}"), include_str!("layout.txt"));
}
