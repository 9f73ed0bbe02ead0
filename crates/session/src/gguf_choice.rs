//! Chooses one of a repository's GGUF files.
//!
//! A repository holds one model in ten to thirty quantizations, and other files beside them. As in
//! llama.cpp, a name such as `Q4_K_M` picks the file with that name; without one it is Q4_K_M, else
//! Q8_0, else the first. A model in parts is picked whole.

use std::fmt;

/// The requested file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pick {
    /// The repository's default.
    Default,
    /// A quantization, by its name in files' names: `Q4_K_M`.
    Tag(String),
    /// A file, with its folders.
    File(String),
}

/// Written as after ORG/NAME.
impl fmt::Display for Pick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => Ok(()),
            Self::Tag(tag) => write!(f, ":{tag}"),
            Self::File(file) => write!(f, "/{file}"),
        }
    }
}

/// Taken in this order if nothing is requested.
const PREFERRED: [&str; 2] = ["Q4_K_M", "Q8_0"];
/// Parts of the names of files that accompany a model and are none.
const BESIDE: [&str; 8] = ["mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-", ".eagle.", ".medusa."];
const ENDING: &str = ".gguf";

/// A model in one file, or in parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice<'a> {
    /// Files in the order of their numbers.
    pub files: Vec<&'a str>,
    /// Expected number of parts.
    pub parts: usize,
}

impl Choice<'_> {
    pub fn is_whole(&self) -> bool {
        self.files.len() == self.parts
    }

    /// Its name among the others of `repository`.
    fn pick(&self, repository: &[Choice<'_>]) -> Pick {
        let first = self.files[0];
        let (stem, _) = split_name(first).unwrap_or((first, None));
        let tag = stem.rsplit(['-', '.', '/']).next().unwrap_or_default();
        let plain = !tag.is_empty() && tag.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let names_it = |other: &Choice<'_>| bears(other.files[0], tag);
        match plain && repository.iter().find(|other| names_it(other)) == Some(self) {
            true => Pick::Tag(tag.to_owned()),
            false => Pick::File(first.to_owned()),
        }
    }
}

/// The model that `pick` selects among the files of a repository.
pub fn choose<'a>(files: &[&'a str], pick: &Pick) -> Option<Choice<'a>> {
    let mut models = models(files);
    let at = match pick {
        Pick::Tag(tag) => models.iter().position(|model| bears(model.files[0], tag)),
        Pick::File(name) => {
            models.iter().position(|model| model.files.iter().any(|file| file.eq_ignore_ascii_case(name)))
        }
        Pick::Default => {
            let preferred = PREFERRED.iter().find_map(|tag| models.iter().position(|model| bears(model.files[0], tag)));
            preferred.or(if models.is_empty() { None } else { Some(0) })
        }
    };
    at.map(|at| models.swap_remove(at))
}

/// Every model among the files, as the pick that selects it.
pub fn picks(files: &[&str]) -> Vec<Pick> {
    let models = models(files);
    models.iter().map(|model| model.pick(&models)).collect()
}

/// Models in the order of their first files.
fn models<'a>(files: &[&'a str]) -> Vec<Choice<'a>> {
    let mut found: Vec<(&str, Choice<'a>)> = Vec::new();
    let mut sorted: Vec<&'a str> = files.iter().copied().filter(|file| is_model(file)).collect();
    sorted.sort_unstable();
    for file in sorted {
        let Some((stem, part)) = split_name(file) else { continue };
        let parts = part.map_or(1, |(_, count)| count);
        match found.iter_mut().find(|(other, model)| *other == stem && part.is_some() && model.parts == parts) {
            Some((_, model)) => model.files.push(file),
            None => found.push((stem, Choice { files: vec![file], parts })),
        }
    }
    found.into_iter().map(|(_, model)| model).collect()
}

fn is_model(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    is_gguf(path) && !BESIDE.iter().any(|other| name.to_ascii_lowercase().contains(other))
}

pub fn is_gguf(path: &str) -> bool {
    path.len() > ENDING.len() && path.is_char_boundary(path.len() - ENDING.len()) && {
        path[path.len() - ENDING.len()..].eq_ignore_ascii_case(ENDING)
    }
}

/// A file's path without its ending and its place among parts, and that place: number and count.
pub fn split_name(path: &str) -> Option<(&str, Option<(usize, usize)>)> {
    let stem = is_gguf(path).then(|| &path[..path.len() - ENDING.len()])?;
    let part = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| (text.len() == 5).then(|| text.parse::<usize>().ok()).flatten();
        Some((name, (digits(number)?, digits(count)?)))
    };
    Some(part().map_or((stem, None), |(name, place)| (name, Some(place))))
}

/// Whether a path names that quantization: `Q4_K_M` is not in `IQ4_K_M.gguf`, and `Q4_K` not in
/// `Q4_K_M.gguf`.
fn bears(path: &str, tag: &str) -> bool {
    let (path, tag) = (path.to_ascii_lowercase(), tag.to_ascii_lowercase());
    let starts = |at: usize| path[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric());
    let ends = |at: usize| path[at..].starts_with(['.', '-', '/']);
    !tag.is_empty() && path.match_indices(&tag).any(|(at, found)| starts(at) && ends(at + found.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPOSITORY: &[&str] = &[
        "README.md",
        "config.json",
        "mmproj-model-F16.gguf",
        "m-BF16/m-BF16-00002-of-00002.gguf",
        "m-BF16/m-BF16-00001-of-00002.gguf",
        "m-IQ4_K_M.gguf",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-UD-Q4_K_XL.gguf",
        "m-f16.gguf",
        "m.imatrix.gguf",
        "m-Q4_K_M.eagle.gguf",
    ];

    fn tag(tag: &str) -> Pick {
        Pick::Tag(tag.into())
    }

    #[test]
    fn one_quantization_of_many() {
        let check = |files: &[&str], pick: Pick, expect: &[&str]| {
            let found = choose(files, &pick).map(|choice| choice.files).unwrap_or_default();
            assert_eq!(found, expect, "{pick:?} of {files:?}");
        };
        check(REPOSITORY, Pick::Default, &["m-Q4_K_M.gguf"]);
        check(REPOSITORY, tag("q4_k_m"), &["m-Q4_K_M.gguf"]);
        check(REPOSITORY, tag("Q4_K_S"), &["m-Q4_K_S.gguf"]);
        check(REPOSITORY, tag("UD-Q4_K_XL"), &["m-UD-Q4_K_XL.gguf"]);
        check(REPOSITORY, tag("F16"), &["m-f16.gguf"]);
        let parts = ["m-BF16/m-BF16-00001-of-00002.gguf", "m-BF16/m-BF16-00002-of-00002.gguf"];
        check(REPOSITORY, tag("BF16"), &parts);
        check(REPOSITORY, Pick::File(parts[1].into()), &parts);
        check(REPOSITORY, Pick::File("M-q4_k_s.gguf".into()), &["m-Q4_K_S.gguf"]);
        for none in [tag("Q4_K"), tag("Q8_0"), tag("mmproj"), tag(""), Pick::File("m.gguf".into())] {
            check(REPOSITORY, none, &[]);
        }
        check(&["a-Q2_K.gguf", "a-Q8_0.gguf"], Pick::Default, &["a-Q8_0.gguf"]);
        check(&["b-Q3_K_L.gguf", "a-Q2_K.gguf"], Pick::Default, &["a-Q2_K.gguf"]);
        check(&["mmproj-a.gguf", "model.safetensors"], Pick::Default, &[]);
        let half = choose(&["a-00002-of-00003.gguf", "a-00001-of-00003.gguf"], &Pick::Default);
        assert!(half.is_some_and(|choice| !choice.is_whole()));
    }

    #[test]
    fn what_there_is_can_be_asked_for() {
        let found = picks(REPOSITORY);
        let names: Vec<String> = found.iter().map(Pick::to_string).collect();
        assert_eq!(names, [":BF16", ":IQ4_K_M", ":Q4_K_M", ":Q4_K_S", ":Q4_K_XL", ":f16"]);
        for files in [REPOSITORY, &["a/x-Q4_0.gguf", "b/x-Q4_0.gguf", "plain.gguf"]] {
            let chosen: Vec<_> = picks(files).iter().map(|pick| choose(files, pick)).collect();
            let models: Vec<_> = models(files).into_iter().map(Some).collect();
            assert_eq!(chosen, models, "{files:?}");
        }
    }

    #[test]
    fn parts_are_known_by_their_numbers() {
        let check = |path: &str, expect| assert_eq!(split_name(path), expect, "{path}");
        check("m.gguf", Some(("m", None)));
        check("m.GGUF", Some(("m", None)));
        check("a/m-00001-of-00003.gguf", Some(("a/m", Some((1, 3)))));
        check("m-1-of-3.gguf", Some(("m-1-of-3", None)));
        check("Qwen2.5-7B-Instruct-Q4_K_M.gguf", Some(("Qwen2.5-7B-Instruct-Q4_K_M", None)));
        check("m.safetensors", None);
        check(".gguf", None);
        check("é.gguf", Some(("é", None)));
        check("ééé", None);
    }
}
