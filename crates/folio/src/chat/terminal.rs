//! How the terminal is set while a chat runs, and that it is put back: when the chat ends, in a panic, and when a signal asks
//! for the end while the line editor has it in its hands.
//!
//! Between two prompts, that is while an answer comes, keys are not shown and wait for the next prompt, as many as come. The
//! terminal's own editing of lines, which cuts them at 4,095 bytes, stays off all the time, so that no moment is left in
//! which it could.

#[cfg(unix)]
mod unix {
    use std::fs::{File, OpenOptions};
    use std::io::{IsTerminal, Write};
    use std::os::fd::AsFd;

    use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

    /// A pasted text comes between marks, so that its line ends can be told from the Enter key.
    const MARK_PASTES: &[u8] = b"\x1b[?2004h";
    const PLAIN_PASTES: &[u8] = b"\x1b[?2004l";

    /// Puts the terminal back when it goes.
    pub struct Terminal(Option<Kept>);

    struct Kept {
        before: Termios,
        screen: File,
    }

    impl Terminal {
        /// Where no line editor is used nothing is changed, and nothing put back.
        pub fn keep(edits: bool) -> Self {
            let kept = || Some(Kept { before: tcgetattr(std::io::stdin()).ok()?, screen: screen()? });
            let terminal = Self(edits.then(kept).flatten());
            if let Some(kept) = &terminal.0 {
                let mut held = kept.before.clone();
                held.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ECHONL);
                // Ctrl-C is a signal, and leaves the keys before it where they are.
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

    /// Where the terminal is written to.
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

/// Elsewhere the line editor alone sets the terminal.
#[cfg(not(unix))]
pub struct Terminal;

#[cfg(not(unix))]
impl Terminal {
    pub fn keep(_: bool) -> Self {
        Self
    }

    pub fn mark_pastes(&self) {}
}
