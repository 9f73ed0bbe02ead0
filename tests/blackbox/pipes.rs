//! Output without a reader, and output that cannot be written.

use std::io::Write;
use std::process::{Output, Stdio};

use folio_testing::wait::until;

use crate::http::health_at;
use crate::{folio, scratch};

/// The writing end of a pipe with a closed reading end.
fn left() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

fn commands() -> Vec<Vec<String>> {
    let text = scratch("pipes").join("text.rs");
    std::fs::write(&text, "fn main() {\n    println!(\"{}\", 1 + 1);\n}\n").expect("writable");
    let text = text.to_str().expect("UTF-8").to_string();
    let words = |line: &str| line.split(' ').map(|word| word.replace("TEXT", &text)).collect();
    [
        "inspect",
        "plan",
        "plan --json",
        "run -p fn -n 4",
        "run -n 4",
        "eval --text TEXT",
        "eval --text TEXT --json",
        "bench latency --input-len 4 --output-len 4 --rounds 1",
        "bench latency --json --input-len 4 --output-len 4 --rounds 1",
        "bench prefix --input-len 4 --output-len 4 --rounds 1 --pairs 1 --prompt-len 20 --streams 1",
        "bench fairness --requests 2 --flood 2 --input-len 4 --output-len 4 --streams 2",
        "--help",
    ]
    .map(words)
    .to_vec()
}

/// With a question on standard input, for the chat.
fn run(args: &[String], stdout: Stdio) -> Output {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut command = folio(&args);
    let mut child =
        command.stdin(Stdio::piped()).stdout(stdout).stderr(Stdio::piped()).spawn().expect("the binary starts");
    // The process may have ended before it reads.
    let _ = child.stdin.take().expect("stdin").write_all(b"fn\nfn\n");
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_reader_that_leaves_ends_a_command_quietly() {
    for args in commands() {
        let output = run(&args, left());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.contains("error")), (Some(0), false), "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{args:?}: {said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_no_panic() {
    for args in commands().into_iter().filter(|args| args[0] != "--help" && args[..] != ["run", "-n", "4"]) {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("it is there");
        let output = run(&args, full.into());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        let expect = "error: could not write to standard output: No space left on device";
        assert!(said.contains(expect) && !said.contains("panicked"), "{args:?}: {said}");
    }
}

#[test]
fn a_server_whose_messages_nobody_reads_serves() {
    let socket = scratch("pipes-serve").join("s");
    let mut child = folio(&["serve", "--max-num-seqs", "1", "--uds", socket.to_str().expect("UTF-8")])
        .stderr(left())
        .spawn()
        .expect("the binary starts");
    until("it is ready", || {
        let ended = child.try_wait().expect("it can be waited for");
        assert!(ended.is_none(), "it has ended: {ended:?}");
        health_at(&socket).is_ok_and(|status| status == 200)
    });
    child.kill().expect("it was running");
    child.wait().expect("it ends");
}
