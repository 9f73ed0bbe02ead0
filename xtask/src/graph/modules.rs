//! Edges between the top modules of a crate, read from its sources.
//!
//! A module is a file beside lib.rs together with the folder of its name. An edge is a path that
//! begins with `crate::`. Tests do not count: they may look at any module.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

/// The modules that each module names.
pub type Edges = BTreeMap<String, BTreeSet<String>>;

/// The edges of the crate whose sources are in a folder.
pub fn edges(folder: &Path) -> Result<Edges> {
    let mut edges = Edges::new();
    read(folder, None, &mut edges)?;
    let modules: BTreeSet<String> = edges.keys().cloned().collect();
    for (module, named) in &mut edges {
        named.retain(|name| name != module && modules.contains(name));
    }
    Ok(edges)
}

/// Adds the files of a folder, which belong to `module` or are modules themselves.
fn read(folder: &Path, module: Option<&str>, edges: &mut Edges) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if matches!(stem.as_str(), "lib" | "tests") {
            continue;
        }
        let module = module.unwrap_or(&stem);
        if path.is_dir() {
            read(&path, Some(module), edges)?;
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            edges.entry(module.to_owned()).or_default().extend(named(&std::fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// Names behind `crate::` in a source, up to its tests.
fn named(source: &str) -> BTreeSet<String> {
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut names = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(list) => names.extend(heads(list)),
            None => names.extend(identifier(rest)),
        }
    }
    names
}

/// First names of the paths in `a, b::{c, d}, e}`.
fn heads(list: &str) -> Vec<String> {
    let (mut depth, mut start, mut found) = (0usize, 0, Vec::new());
    for (at, letter) in list.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.extend(identifier(list[start..at].trim_start()));
                if letter == '}' {
                    break;
                }
                start = at + 1;
            }
            _ => {}
        }
    }
    found
}

fn identifier(text: &str) -> Option<String> {
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(text.len());
    (end > 0).then(|| text[..end].to_owned())
}

/// A path of modules that returns to its first, if there is one.
pub fn cycle(edges: &Edges) -> Option<Vec<String>> {
    let mut finished = BTreeSet::new();
    edges.keys().find_map(|module| walk(module, edges, &mut Vec::new(), &mut finished))
}

fn walk(module: &str, edges: &Edges, path: &mut Vec<String>, finished: &mut BTreeSet<String>) -> Option<Vec<String>> {
    if let Some(at) = path.iter().position(|visited| visited == module) {
        return Some([&path[at..], &[module.to_owned()]].concat());
    }
    if finished.contains(module) {
        return None;
    }
    path.push(module.to_owned());
    let found = edges.get(module)?.iter().find_map(|next| walk(next, edges, path, finished));
    path.pop();
    finished.insert(module.to_owned());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_source() {
        let source = "use crate::plan::{Plan, tests};\nuse crate::{machine, units::{a, b}, target};\n// crate::comment\n\
                      fn f() { crate::naming::of() }\n#[cfg(test)]\nmod tests { use crate::assets; }\n";
        let expect = ["machine", "naming", "plan", "target", "units"].map(str::to_owned);
        assert_eq!(named(source), BTreeSet::from(expect));
    }

    #[test]
    fn a_cycle_is_found_and_named() {
        let edges = |list: &[(&str, &[&str])]| -> Edges {
            let named = |names: &[&str]| names.iter().map(ToString::to_string).collect();
            list.iter().map(|(module, names)| (module.to_string(), named(names))).collect()
        };
        let one_way = edges(&[("a", &["b", "c"]), ("b", &["d"]), ("c", &["b", "d"]), ("d", &[])]);
        assert_eq!(cycle(&one_way), None);
        let round = edges(&[("a", &["b"]), ("b", &["c"]), ("c", &["d"]), ("d", &["b"])]);
        assert_eq!(cycle(&round), Some(["b", "c", "d", "b"].map(str::to_owned).to_vec()));
    }
}
