//! The terminal's settings during a chat, which are restored when the chat ends, in a panic, and
//! when a signal ends the process while the line editor is active.
//!
//! Between two prompts, while an answer is printed, keys are not shown and wait for the next
//! prompt, any number of them. The terminal's own line editing, which cuts lines at 4,095 bytes,
//! stays off all the time, so that it can never cut one.

#[cfg(unix)]
mod unix {
    use std::fs::{File, OpenOptions};
    use std::io::{IsTerminal, Write};
    use std::os::fd::AsFd;

    use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

    /// A pasted text comes between marks, so that its line ends can be told from the Enter key.
    const MARK_PASTES: &[u8] = b"\x1b[?2004h";
    const PLAIN_PASTES: &[u8] = b"\x1b[?2004l";

    /// Restores the terminal's settings when it is dropped.
    pub struct Terminal(Option<Kept>);

    struct Kept {
        before: Termios,
        screen: File,
    }

    impl Terminal {
        /// Without a line editor no setting is changed or restored.
        pub fn keep(edits: bool) -> Self {
            let kept = || Some(Kept { before: tcgetattr(std::io::stdin()).ok()?, screen: screen()? });
            let terminal = Self(edits.then(kept).flatten());
            if let Some(kept) = &terminal.0 {
                let mut held = kept.before.clone();
                held.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ECHONL);
                // Ctrl-C is a signal, and the keys typed before it stay in the input.
                held.local_flags.insert(LocalFlags::ISIG | LocalFlags::NOFLSH);
                kept.set(&held);
            }
            terminal
        }

        /// To be called before each answer: the line editor ends its line by turning the marks off.
        pub fn mark_pastes(&self) {
            if let Some(kept) = &self.0 {
                kept.write(MARK_PASTES);
            }
        }
    }

    impl Kept {
        /// A terminal that is gone needs nothing.
        fn set(&self, modes: &Termios) {
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSADRAIN, modes);
        }

        fn write(&self, text: &[u8]) {
            let _ = (&self.screen).write_all(text);
        }
    }

    impl Drop for Terminal {
        fn drop(&mut self) {
            if let Some(kept) = &self.0 {
                kept.set(&kept.before);
                kept.write(PLAIN_PASTES);
            }
        }
    }

    /// The file through which the terminal is written to.
    fn screen() -> Option<File> {
        let stdout = std::io::stdout();
        match stdout.is_terminal() {
            true => Some(File::from(stdout.as_fd().try_clone_to_owned().ok()?)),
            false => OpenOptions::new().write(true).open("/dev/tty").ok(),
        }
    }
}

#[cfg(unix)]
pub use unix::Terminal;

/// On other systems only the line editor sets the terminal.
#[cfg(not(unix))]
pub struct Terminal;

#[cfg(not(unix))]
impl Terminal {
    pub fn keep(_: bool) -> Self {
        Self
    }

    pub fn mark_pastes(&self) {}
}
