use folio_testing::Folder;

use super::*;

const A: &str = "aaaaaaaaaaaaaaaa";
const B: &str = "bbbbbbbbbbbbbbbb";

fn read(text: &str) -> Result<Keys, SetupError> {
    let mut keys = Keys::none();
    keys.add_text(text).map(|()| keys)
}

#[test]
fn a_file_holds_keys_options_and_comments() {
    let hashed: String = Sha256::digest(B).iter().map(|byte| format!("{byte:02X}")).collect();
    let text = format!(
        "# the team\r\n\n  {A} name=alice weight=3 max-in-flight=32 salt=team # until May\nsha256:{hashed} salt=none\n\
         with#hash#inside-it #note\n"
    );
    let keys = read(&text).unwrap();
    let [alice, second, third] = &keys.keys[..] else { panic!("three keys, found {keys:?}") };
    assert_eq!((&*alice.name, alice.weight, alice.max_in_flight), ("alice", 3, Some(32)));
    assert_eq!((alice.salt.clone(), second.salt.clone(), third.salt.clone()), {
        (Salt::Text("team".into()), Salt::None, Salt::Own)
    });
    assert_eq!((&*second.name, second.weight, second.max_in_flight), ("key-2", 1, None));
    assert_eq!(&*third.name, "key-3");
    let digests = [A, B, "with#hash#inside-it"].map(|secret| <[u8; 32]>::from(Sha256::digest(secret)));
    assert_eq!([alice.digest, second.digest, third.digest], digests);
}

#[test]
fn a_key_s_line_says_which_priorities_it_may_use() {
    for (option, expected) in [
        ("", i32::MIN..=i32::MAX),
        ("priority=-5..5", -5..=5),
        ("priority=0..2147483647", 0..=i32::MAX),
        ("priority=3", 3..=3),
    ] {
        assert_eq!(read(&format!("{A} {option}")).unwrap().keys[0].priorities, expected, "{option}");
    }
}

#[test]
fn lists_and_files_add_up() {
    let mut keys = Keys::none();
    keys.add_text(&format!("{A} name=first")).unwrap();
    keys.add_list(&format!(" {B} ,, cccccccccccccccc,")).unwrap();
    assert_eq!(keys.iter().map(|key| &*key.name).collect::<Vec<_>>(), ["first", "key-2", "key-3"]);
    let again = keys.add_list(A).unwrap_err().to_string();
    assert_eq!(again, "entry 1 of the list of API keys: the same key as line 1 of the key file");
}

#[test]
fn what_is_wrong_is_named_by_line_and_never_quoted() {
    let long = "x".repeat(513);
    let rows: &[(String, &str)] = &[
        ("short-s3cr3t-15".into(), "16 to 512 characters"),
        (long, "16 to 512 characters"),
        ("s3cr3t-with-ümlaut-in-it".into(), "printable ASCII"),
        ("s3cr3t with spaces inside it".into(), "16 to 512 characters"),
        ("s3cr3t-long-enough and-more".into(), "a key has no spaces"),
        ("sha256:s3cr3t".into(), "64 hexadecimal digits"),
        (format!("sha256:{}", "+1".repeat(32)), "64 hexadecimal digits"),
        (format!("sha256:{}", "é".repeat(32)), "64 hexadecimal digits"),
        (format!("{A} name="), "1 to 64 letters"),
        (format!("{A} name=a/b"), "1 to 64 letters"),
        (format!("{A} name={}", "n".repeat(65)), "1 to 64 letters"),
        (format!("{A} weight=0"), "from 1 to 1000"),
        (format!("{A} weight=1001"), "from 1 to 1000"),
        (format!("{A} weight=-1"), "from 1 to 1000"),
        (format!("{A} max-in-flight=0"), "from 1 to 1000000"),
        (format!("{A} max-in-flight=99999999999999999999"), "from 1 to 1000000"),
        (format!("{A} priority="), "-5..5"),
        (format!("{A} priority=high"), "-5..5"),
        (format!("{A} priority=5..-5"), "the lower one first"),
        (format!("{A} priority=-5..=5"), "-5..5"),
        (format!("{A} priority=0..2147483648"), "-5..5"),
        (format!("{A} salt="), "1 to 64 printable"),
        (format!("{A} salt={}", "s".repeat(65)), "1 to 64 printable"),
        (format!("{A} colour=red"), "expected name=, weight=, max-in-flight=, priority= or salt="),
        (format!("{A} weight=1 weight=2"), "given twice"),
        (format!("{B} name=taken"), "the name is used twice"),
        ("cccccccccccccccc".into(), "the same key as line 2 of the key file"),
    ];
    for (line, expected) in rows {
        let text = format!("# keys\ncccccccccccccccc name=taken\n{line}\n");
        let error = read(&text).unwrap_err().to_string();
        assert!(error.starts_with("line 3 of the key file: ") && error.contains(expected), "{line}: {error}");
        for word in line.split_ascii_whitespace().filter(|word| word.len() > 8 && !word.starts_with("max-in")) {
            assert!(!error.contains(word), "{error} repeats {word}");
        }
    }
    let shown = format!("{:?}", read(&format!("{A} name=alice")).unwrap().keys[0]);
    assert!(shown.contains("alice") && !shown.contains("digest"), "{shown}");
}

#[test]
fn nothing_where_keys_should_be_is_an_error() {
    for text in ["", "\n\n", "# only\n  # comments\n"] {
        assert!(matches!(read(text), Err(SetupError::NoKeys(_))), "{text:?}");
    }
    for list in ["", " ", ",,"] {
        assert!(matches!(Keys::none().add_list(list), Err(SetupError::NoKeys(_))), "{list:?}");
    }
}

#[test]
fn ten_thousand_keys_are_enough() {
    let lines = |count: usize| (0..count).map(|n| format!("secret-number-{n:06}\n")).collect::<String>();
    assert_eq!(read(&lines(MOST_KEYS)).unwrap().len(), MOST_KEYS);
    assert!(matches!(read(&lines(MOST_KEYS + 1)), Err(SetupError::TooManyKeys(MOST_KEYS))));
}

#[test]
fn files_are_read_and_their_readers_noticed() {
    let folder = Folder::new("keys");
    let path = folder.join("keys");
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Keys::none().add_file(&path)
    };
    assert!(read(A.as_bytes()).is_ok());
    assert!(matches!(read(b"\xff\xfe"), Err(SetupError::NotText { .. })));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        for (mode, warned) in [(0o600, false), (0o400, false), (0o640, true), (0o604, true), (0o666, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            std::fs::write(&path, A).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let warning = Keys::none().add_file(&path).unwrap();
            assert_eq!(warning.is_some(), warned, "{mode:o}");
            assert!(warning.is_none_or(|text| text.contains("chmod 600") && !text.contains(A)));
        }
    }
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(Keys::none().add_file(&path), Err(SetupError::Unreadable { .. })));
}
