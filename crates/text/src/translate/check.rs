//! Whether two tokenizers carry text both ways.

use crate::{Error, Result, Tokenizer};

/// Samples of text: code and prose, characters of one to four bytes, combining marks, runs of
/// spaces and line ends, and every character of a keyboard.
const SAMPLES: [&str; 6] = [
    "The quick brown fox jumps over the lazy dog; it didn't ask why, did it? 3.14159 + 2 = 5.14159",
    "fn main() {\n    let mut seen: HashMap<&str, usize> = HashMap::new();\n\tif a <= b && c != 0x1F {\n\t\treturn;\n\t}\n}\n",
    "  two spaces  here,\r\n\r\n\n\n    four there \t and a tab ",
    " !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~",
    "Ça va déjà, Øyvind? Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 日本語のテキスト, 中文，한국어.",
    "🦀 👩‍👩‍👧 🇫🇷 𝒳 … – “quoted” ½ €5 ∀x∈ℝ",
];

/// One token of a vocabulary in this many may come back as other text: normalisers compose
/// characters that a few tokens have in parts. Those tokens are left out of drafts.
const FEW: usize = 100;

/// Tokens of the draft for one of the target's.
pub fn check(target: &Tokenizer, draft: &Tokenizer) -> Result<f32> {
    let (target, draft) = (Side::new(target, "the model's")?, Side::new(draft, "the draft model's")?);
    let mut num_tokens = [0, 0];
    for (side, count) in [&target, &draft].into_iter().zip(&mut num_tokens) {
        for text in SAMPLES {
            *count += side.carries(text, true)?;
            side.carries(text, false)?;
        }
    }
    draft.carries_vocabulary(&target)?;
    target.carries_vocabulary(&draft)?;
    Ok(num_tokens[1] as f32 / num_tokens[0] as f32)
}

struct Side<'a> {
    tokenizer: &'a Tokenizer,
    whose: &'static str,
    /// Whether encoding puts a space before a text.
    adds_space: bool,
}

impl<'a> Side<'a> {
    fn new(tokenizer: &'a Tokenizer, whose: &'static str) -> Result<Self> {
        let adds_space = tokenizer.leading_space().ok_or(Error::UnusualDecoder { whose })?;
        Ok(Self { tokenizer, whose, adds_space })
    }

    /// A text comes back as it was; in how many tokens.
    fn carries(&self, text: &str, begins: bool) -> Result<usize> {
        let ids = if begins { self.tokenizer.encode(text, false) } else { self.tokenizer.encode_continuing(text) }?;
        let found = self.tokenizer.bytes_of(&ids);
        let added = if begins && self.adds_space { found.strip_prefix(b" ") } else { None };
        let found = added.unwrap_or(&found);
        if found != text.as_bytes() {
            let (whose, text, found) = (self.whose, text.into(), String::from_utf8_lossy(found).into());
            return Err(Error::LosesText { whose, text, found });
        }
        Ok(ids.len())
    }

    /// So does what the other's tokens stand for; parts of characters have no text of their own.
    fn carries_vocabulary(&self, other: &Side<'_>) -> Result<()> {
        let (mut num_tokens, mut lost, mut first) = (0, 0, None);
        for id in (0..other.tokenizer.vocab_size() as u32).filter(|&id| other.tokenizer.is_text(id)) {
            let Ok(text) = std::str::from_utf8(other.tokenizer.shown_bytes(id, true)) else { continue };
            num_tokens += 1;
            if let Err(error) = self.carries(text, false) {
                lost += 1;
                first = first.or(Some(error));
            }
        }
        match first {
            Some(error) if lost * FEW > num_tokens => {
                Err(Error::LosesVocabulary { lost, num_tokens, whose: other.whose, first: Box::new(error) })
            }
            _ => Ok(()),
        }
    }
}
