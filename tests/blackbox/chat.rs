//! The chat of `folio run` at a terminal.

use std::process::Command;

use crate::screen::Screen;
use crate::{refusal, stdout};

const QUESTION: &str = "What is `Vec`?";
/// Every prompt begins with this, and so does every answer, so that pasted text differs from typed
/// text.
const MARK_PASTES: &str = "\x1b[?2004h";
const PLAIN_PASTES: &str = "\x1b[?2004l";
const ENTER: &str = "\r";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_BACKSLASH: &str = "\x1c";
const UP: &str = "\x1b[A";

fn pasted(text: &str) -> String {
    // A terminal sends the Enter key's byte for the end of a line.
    format!("\x1b[200~{}\x1b[201~", text.replace('\n', "\r"))
}

/// The answer to one question, as a terminal shows it.
fn answer(question: &str) -> String {
    stdout(&["run", "-n", "12", "--temperature", "0", "-p", question]).trim_end().replace('\n', "\r\n")
}

fn chat() -> Screen {
    let mut screen = Screen::start("xterm", &["run", "-n", "12", "--temperature", "0"]);
    screen.wait_for("ask away");
    screen.wait_for(MARK_PASTES);
    screen
}

#[test]
fn ctrl_c_at_the_prompt_loses_nothing() {
    let mut screen = chat();
    screen.type_in(CTRL_C);
    screen.wait_for("/exit leaves");
    screen.type_in(&format!("{QUESTION}{ENTER}"));
    screen.wait_for(&answer(QUESTION));
    // Text typed before it is gone, text typed behind it is not.
    screen.type_in(&format!("/new{ENTER}"));
    screen.wait_for("/new");
    // Between two prompts Ctrl-C is a signal, which leaves the keys before it.
    screen.wait_for(MARK_PASTES);
    screen.type_in(&format!("half a line{CTRL_C}{QUESTION}{ENTER}"));
    screen.wait_for(&answer(QUESTION));
    screen.type_in(&format!("{CTRL_C}{CTRL_C}/exit{ENTER}"));
    assert!(screen.end().success());
}

#[test]
fn long_lines_arrive_whole() {
    let text = "fn a() {} ".repeat(789);
    let short = ["run", "--max-model-len", "128", "--temperature", "0"];
    let whole = refusal(&[&short[..], &["-p", text.trim_end()]].concat());
    let expect = whole.trim_end().split_once("error: ").expect("an error").1;
    assert!(expect.starts_with("the conversation has "), "{expect}");
    let mut screen = Screen::start("xterm", &short);
    screen.wait_for("ask away");
    screen.wait_for(MARK_PASTES);
    for typed in [pasted(&text), text.clone()] {
        screen.type_in(&format!("{typed}{ENTER}"));
        screen.wait_for(expect);
    }
    // The same while an answer is generated: the text waits for the prompt, and is not shown in the
    // answer.
    screen.wait_for(MARK_PASTES);
    screen.type_in(&format!("{QUESTION}{ENTER}"));
    screen.wait_for(MARK_PASTES);
    screen.type_in(&format!("/new{ENTER}{}{ENTER}", pasted(&text)));
    screen.wait_for(expect);
    screen.type_in(CTRL_D);
    assert!(screen.end().success());
}

#[test]
fn what_is_pasted_at_once_is_one_question() {
    let text = "Explain this:\n\nfn main() {\n    let x = 1;\n}";
    let mut screen = chat();
    screen.type_in(&format!("{}{ENTER}", pasted(text)));
    screen.wait_for(&answer(text));
    screen.type_in(&format!("/exit{ENTER}"));
    assert!(screen.end().success());
    // Two prompts and one answer.
    assert_eq!(screen.text.matches(MARK_PASTES).count(), 3, "{:?}", screen.text);
}

#[test]
fn up_finds_what_was_asked() {
    let mut screen = chat();
    screen.type_in(&format!("{QUESTION}{ENTER}"));
    screen.wait_for(&answer(QUESTION));
    screen.type_in(&format!("/new{ENTER}{UP}{UP}{ENTER}"));
    screen.wait_for(&answer(QUESTION));
    screen.type_in(CTRL_D);
    assert!(screen.end().success());
}

#[test]
fn however_it_ends_the_terminal_is_as_it_was() {
    let long = ["run", "--raw", "-n", "3000", "--temperature", "0"];
    let check = |asks: bool, key: &str, signal: &str, code: i32| {
        let mut screen = Screen::start("xterm", &long);
        let before = screen.settings();
        screen.wait_for("ask away");
        screen.wait_for(MARK_PASTES);
        screen.wait_for("> ");
        assert_ne!(screen.settings(), before, "the line editor has it");
        if asks {
            screen.type_in(&format!("fn main() {{{ENTER}"));
            screen.wait_for(MARK_PASTES);
            screen.wait_for(" ");
        }
        screen.type_in(key);
        if !signal.is_empty() {
            let sent = Command::new("kill").args([signal, &screen.child.id().to_string()]).status();
            assert!(sent.expect("kill runs").success());
        }
        let status = screen.end();
        assert_eq!(status.code(), Some(code), "{asks} {key:?} {signal}: {status}: {:?}", screen.text);
        assert_eq!(screen.settings(), before, "{asks} {key:?} {signal}");
        let [on, off] = [MARK_PASTES, PLAIN_PASTES].map(|mark| screen.text.rfind(mark));
        assert!(on < off, "{asks} {key:?} {signal}: {:?}", screen.text);
    };
    check(false, &format!("/exit{ENTER}"), "", 0);
    check(false, CTRL_D, "", 0);
    check(false, "", "-TERM", 143);
    check(false, "half a line", "-HUP", 129);
    check(true, "", "-TERM", 143);
    check(true, CTRL_BACKSLASH, "", 131);
}

#[test]
fn ctrl_c_stops_the_answer() {
    let mut screen = Screen::start("xterm", &["run", "--raw", "-n", "3000", "--temperature", "0"]);
    screen.wait_for(MARK_PASTES);
    screen.type_in(&format!("fn main() {{{ENTER}"));
    screen.wait_for(MARK_PASTES);
    screen.wait_for(" ");
    screen.type_in(CTRL_C);
    // The next prompt.
    screen.wait_for(MARK_PASTES);
    screen.type_in(&format!("/exit{ENTER}"));
    assert!(screen.end().success());
}

#[test]
fn a_terminal_that_moves_no_cursor_has_plain_lines() {
    let mut screen = Screen::start("dumb", &["run", "-n", "12", "--temperature", "0"]);
    screen.wait_for("> ");
    screen.type_in(&format!("{QUESTION}{ENTER}"));
    screen.wait_for(&answer(QUESTION));
    screen.wait_for("> ");
    screen.type_in(CTRL_C);
    screen.wait_for("/exit leaves");
    screen.type_in(&format!("/exit{ENTER}"));
    assert!(screen.end().success());
    assert!(!screen.text.contains('\x1b'), "{:?}", screen.text);
}
