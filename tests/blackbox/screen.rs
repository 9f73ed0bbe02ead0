//! A pseudo-terminal that runs the program under test.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use folio_testing::wait;
use nix::pty::{Winsize, openpty};
use nix::sys::termios::{Termios, tcgetattr};

use crate::folio;

const PATIENCE: Duration = Duration::from_secs(60);

pub struct Screen {
    pub child: Child,
    keyboard: File,
    /// The program's side, for reading its settings.
    line: OwnedFd,
    shown: Receiver<Vec<u8>>,
    /// All output so far.
    pub text: String,
    /// End of the text that was last waited for.
    mark: usize,
}

impl Screen {
    /// Starts the program with this terminal as its own.
    pub fn start(term: &str, args: &[&str]) -> Self {
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(Some(&size), None).expect("a pseudo-terminal");
        let program = folio(args);
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program.get_program()).args(program.get_args()).env("TERM", term);
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let end = || pair.slave.try_clone().expect("another handle");
        command.stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("setsid, of util-linux, starts");
        let mut screen = File::from(pair.master.try_clone().expect("another handle"));
        let (sender, shown) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0u8; 4096];
            while let Ok(count) = screen.read(&mut bytes) {
                if count == 0 || sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keyboard: pair.master.into(), line: pair.slave, shown, text: String::new(), mark: 0 }
    }

    /// Types in a separate thread, because a terminal with a full buffer blocks until it is read.
    pub fn type_in(&self, keys: &str) {
        let mut keyboard = self.keyboard.try_clone().expect("another handle");
        let keys = keys.to_string();
        std::thread::spawn(move || keyboard.write_all(keys.as_bytes()));
    }

    pub fn settings(&self) -> Termios {
        tcgetattr(&self.line).expect("a terminal")
    }

    /// Waits until this text is shown, behind the last text that was waited for.
    pub fn wait_for(&mut self, part: &str) {
        let begin = Instant::now();
        loop {
            if let Some(found) = self.text[self.mark..].find(part) {
                self.mark += found + part.len();
                return;
            }
            let left = PATIENCE.saturating_sub(begin.elapsed());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.text.push_str(&String::from_utf8_lossy(&bytes)),
                Err(_) => panic!("{part:?} is not shown behind {:?}", &self.text[self.mark..]),
            }
        }
    }

    /// Exit status when it ends by itself, after all output is read.
    pub fn end(&mut self) -> ExitStatus {
        let ended = wait::poll(PATIENCE, || {
            while let Ok(bytes) = self.shown.try_recv() {
                self.text.push_str(&String::from_utf8_lossy(&bytes));
            }
            self.child.try_wait().expect("it can be waited for")
        });
        let status = ended.unwrap_or_else(|| panic!("it does not end: {:?}", &self.text[self.mark..]));
        while let Ok(bytes) = self.shown.recv_timeout(Duration::from_millis(200)) {
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        status
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
