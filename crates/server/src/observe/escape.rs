//! Text from outside, made fit for one line of a log: nothing in it can end the line, move a cursor
//! or turn the order of what a reader sees. And the time, as logs write it.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Characters of one string that are shown; what lies beyond is cut.
const MOST_CHARS: usize = 256;

/// Whether a character must not reach a terminal or a line-based reader.
fn is_unsafe(char: char) -> bool {
    // Line and paragraph separators, marks and overrides of direction, invisible operators, the
    // byte order mark, tags.
    let invisible = matches!(char, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    char.is_control() || invisible
}

/// Appends a text as a JSON string, with its quotes.
pub fn json(out: &mut String, text: &str) {
    out.push('"');
    for char in text.chars().take(MOST_CHARS) {
        match char {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            char if is_unsafe(char) => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            char => out.push(char),
        }
    }
    if text.chars().nth(MOST_CHARS).is_some() {
        out.push_str("...");
    }
    out.push('"');
}

/// As the value of `name=value`: bare where nothing in it can be mistaken, otherwise as JSON writes
/// it.
pub fn word(out: &mut String, text: &str) {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "-_.:/+@,".contains(char);
    if !text.is_empty() && text.len() <= MOST_CHARS && text.chars().all(is_plain) {
        out.push_str(text);
    } else {
        json(out, text);
    }
}

/// RFC 3339 in UTC with milliseconds.
pub fn timestamp(out: &mut String, time: SystemTime) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (year, month, day) = date(since.as_secs() / 86_400);
    let second = since.as_secs() % 86_400;
    let (hour, minute, second, millis) = (second / 3600, second / 60 % 60, second % 60, since.subsec_millis());
    let _ = write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z");
}

/// The date a number of days after 1 January 1970. Years begin in March here, so that a leap day is
/// a year's last.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let days = days + 719_468; // since 1 March of the year 0
    let (era, day) = (days / DAYS_OF_400_YEARS, days % DAYS_OF_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // from March
    let day = day - (153 * month + 2) / 5 + 1;
    let is_next_year = month >= 10;
    (era * 400 + year + u64::from(is_next_year), if is_next_year { month - 9 } else { month + 3 }, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: fn(&mut String, &str), text: &str) -> String {
        let mut out = String::new();
        write(&mut out, text);
        out
    }

    #[test]
    fn nothing_from_outside_ends_a_line_or_moves_a_cursor() {
        let hostile = "a\nb\r\u{1b}[31m\u{85}\u{202e}\u{2028}\u{7f}\0\"\\\u{e0041}é";
        let json_text = written(json, hostile);
        assert!(json_text.chars().all(|char| !is_unsafe(char)), "{json_text}");
        assert_eq!(serde_json::from_str::<String>(&json_text).expect("JSON"), hostile);
        assert_eq!(written(word, hostile), json_text);
    }

    #[test]
    fn plain_words_stay_bare_and_others_are_quoted() {
        let cases = [
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("req-1_a.b", "req-1_a.b"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("a=b", "\"a=b\""),
        ];
        for (text, expected) in cases {
            assert_eq!(written(word, text), expected);
        }
        let long = "x".repeat(1000);
        assert_eq!(written(word, &long).len(), MOST_CHARS + 5);
        assert_eq!(written(word, &long[..256]).len(), 256);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_709_164_800_000, "2024-02-29T00:00:00.000Z"),
            (1_735_689_599_001, "2024-12-31T23:59:59.001Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ];
        for (millis, expected) in cases {
            let mut out = String::new();
            timestamp(&mut out, UNIX_EPOCH + Duration::from_millis(millis));
            assert_eq!(out, expected);
        }
    }
}
