//! Stop strings, found across token and chunk borders.
//!
//! Text comes in pieces of any size. Only text that could still become the start of a stop string
//! is held back: everything else goes out at once. The stop string that is complete first wins; of
//! several that end together, the longest. The result does not depend on how the text was cut.

/// Watches one stream of text.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include_stop: bool,
    /// The end of the text so far: always a proper prefix of some stop string.
    held: String,
    /// The stop string that ended the text, by its place in `stops`.
    matched: Option<usize>,
}

impl StopMatcher {
    /// Empty stop strings are ignored. With `include_stop` the stop string itself is part of the
    /// text.
    pub fn new(mut stops: Vec<String>, include_stop: bool) -> Self {
        stops.retain(|stop| !stop.is_empty());
        StopMatcher { stops, include_stop, held: String::new(), matched: None }
    }

    /// Takes more text. Returns what is safe to show now, and whether a stop string has ended the
    /// text; after that nothing more is shown.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        if self.matched.is_some() {
            return (String::new(), true);
        }
        if self.stops.is_empty() {
            return (text.to_string(), false);
        }
        let mut buffer = std::mem::take(&mut self.held);
        buffer.push_str(text);
        if let Some((start, end, stop)) = self.first_match(&buffer) {
            self.matched = Some(stop);
            buffer.truncate(if self.include_stop { end } else { start });
            return (buffer, true);
        }
        self.held = buffer.split_off(self.first_doubtful(&buffer));
        (buffer, false)
    }

    /// The text has ended. Returns what was held back, and whether a stop string had ended the text
    /// before.
    pub fn finish(&mut self) -> (String, bool) {
        (std::mem::take(&mut self.held), self.matched.is_some())
    }

    /// The stop string that has ended the text.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|stop| self.stops[stop].as_str())
    }

    /// Start, end and index of the stop string that is complete first. A stop's first occurrence is
    /// also the one that ends first, so one search for each is enough.
    fn first_match(&self, buffer: &str) -> Option<(usize, usize, usize)> {
        let place = |(index, stop): (usize, &String)| buffer.find(stop).map(|start| (start, start + stop.len(), index));
        let matches = self.stops.iter().enumerate().filter_map(place);
        matches.min_by_key(|&(start, end, _)| (end, start))
    }

    /// Start of the longest end of `buffer` that a stop string could begin with.
    fn first_doubtful(&self, buffer: &str) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = (buffer.len() + 1).saturating_sub(longest);
        let could_begin =
            |at: &usize| buffer.is_char_boundary(*at) && self.stops.iter().any(|stop| stop.starts_with(&buffer[*at..]));
        (from..buffer.len()).find(could_begin).unwrap_or(buffer.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Looks at every prefix of the whole text, one character longer each time.
    fn naive(text: &str, stops: &[String], include: bool) -> (String, bool) {
        for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let complete = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()));
            if let Some(stop) = complete.max_by_key(|stop| stop.len()) {
                return (text[..if include { end } else { end - stop.len() }].to_string(), true);
            }
        }
        (text.to_string(), false)
    }

    fn streamed(pieces: &[&str], stops: &[String], include: bool) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.to_vec(), include);
        let (mut shown, mut all) = (String::new(), String::new());
        for piece in pieces {
            all.push_str(piece);
            let (text, stopped) = matcher.push(piece);
            shown.push_str(&text);
            if stopped {
                return (shown, true);
            }
            // Nothing is held back that could not still become a stop.
            let held = &all[shown.len()..];
            assert!(held.is_empty() || stops.iter().any(|stop| stop.len() > held.len() && stop.starts_with(held)));
        }
        let (rest, stopped) = matcher.finish();
        (shown + &rest, stopped)
    }

    proptest! {
        #[test]
        fn any_cut_gives_what_the_naive_search_gives(
            text in "[abé日]{0,24}",
            stops in prop::collection::vec("[abé日]{0,4}", 0..4),
            cuts in prop::collection::vec(0usize..24, 0..8),
            include: bool,
        ) {
            let mut places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            places.retain(|at| cuts.contains(at));
            let mut pieces = Vec::new();
            let mut start = 0;
            for at in places.into_iter().chain([text.len()]) {
                pieces.push(&text[start..at]);
                start = at;
            }
            prop_assert_eq!(streamed(&pieces, &stops, include), naive(&text, &stops, include));
        }
    }

    #[test]
    fn a_stop_is_found_across_pieces() {
        let check = |pieces: &[&str], stops: &[&str], expect: (&str, bool)| {
            let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
            let (text, stopped) = streamed(pieces, &stops, false);
            assert_eq!((text.as_str(), stopped), expect, "{pieces:?}");
        };
        check(&["Hel", "lo\nUs", "er:", " x"], &["\nUser:"], ("Hello", true));
        check(&["aa", "ab"], &["aab"], ("a", true));
        check(&["abc"], &["abcd", "b"], ("a", true));
        check(&["xyz"], &["yz", "xyz"], ("", true));
        check(&["a<"], &["</s>"], ("a<", false));
        check(&["日", "本語"], &["本"], ("日", true));
        check(&["abc"], &[""], ("abc", false));
    }
}
