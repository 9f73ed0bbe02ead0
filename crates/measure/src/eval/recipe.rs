//! The rows of a matrix: formats, and the methods that make sense for each.

use anyhow::{Context, Result, bail};
use folio_quantize::write::Mix;
use folio_quantize::{Method, Target};

/// Every format that can be made, the larger ones first.
pub const FORMATS: [&str; 12] = [
    "int8",
    "int8-channel",
    "llm-int8",
    "fp8",
    "fp8-block",
    "q8_0",
    "int4-g32",
    "int4-g128",
    "nvfp4",
    "mxfp4",
    "nf4",
    "q4_k_m",
];

/// How codes are chosen, in the order in which they are told.
pub const METHODS: [&str; 3] = ["rtn", "gptq", "awq"];

/// One form of a model to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    pub format: String,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Folder(Target, Method),
    /// A mixture has its own method.
    Gguf(Mix),
}

impl Recipe {
    pub fn method(&self) -> Option<&'static str> {
        match self.kind {
            Kind::Folder(_, Method::Rtn) => Some("rtn"),
            Kind::Folder(_, Method::Gptq) => Some("gptq"),
            Kind::Folder(_, Method::Awq) => Some("awq"),
            Kind::Gguf(_) => None,
        }
    }

    pub fn needs_calibration(&self) -> bool {
        match self.kind {
            Kind::Folder(target, method) => method != Method::Rtn || target == Target::LlmInt8,
            Kind::Gguf(_) => false,
        }
    }
}

/// The target of a method. AWQ needs zero points, since the columns that it scales up are seldom
/// symmetric around zero.
pub fn aimed(target: Target, method: Method) -> Target {
    match (target, method) {
        (Target::Int { bits: 4, group, .. }, Method::Awq) => Target::Int { bits: 4, group, zero_points: true },
        (target, _) => target,
    }
}

/// Every format by every method. If no methods are named, those that search are kept to formats of
/// 4 bits: at 8 there is little left to gain.
pub fn recipes(formats: Option<&[String]>, methods: Option<&[String]>) -> Result<Vec<Recipe>> {
    let formats = formats.map_or_else(|| FORMATS.map(str::to_owned).to_vec(), <[String]>::to_vec);
    let named = methods.map(|names| names.iter().map(|name| Ok(name.parse::<Method>()?)).collect::<Result<Vec<_>>>());
    let named = named.transpose().context("--methods")?;
    let mut recipes = Vec::new();
    for format in &formats {
        if let Ok(mix) = format.parse::<Mix>() {
            recipes.push(Recipe { format: format.clone(), kind: Kind::Gguf(mix) });
            continue;
        }
        let Ok(target) = format.parse::<Target>() else {
            bail!("--formats: {format} is not a format that folio writes; expected some of {}", FORMATS.join(", "));
        };
        let methods = match &named {
            Some(methods) => &methods[..],
            None if target.bits() == 4 => &[Method::Rtn, Method::Gptq, Method::Awq],
            None => &[Method::Rtn],
        };
        let kinds = methods.iter().map(|method| Kind::Folder(aimed(target, *method), *method));
        recipes.extend(kinds.map(|kind| Recipe { format: format.clone(), kind }));
    }
    Ok(recipes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(recipes: &[Recipe]) -> Vec<String> {
        recipes.iter().map(|recipe| format!("{} {}", recipe.format, recipe.method().unwrap_or("-"))).collect()
    }

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn methods_by_default() {
        let formats = strings(&["int8", "q4_k_m", "int4-g128"]);
        let found = recipes(Some(&formats), None).expect("good names");
        assert_eq!(names(&found), ["int8 rtn", "q4_k_m -", "int4-g128 rtn", "int4-g128 gptq", "int4-g128 awq"]);
        assert_eq!(found.iter().filter(|recipe| recipe.needs_calibration()).count(), 2);
    }

    #[test]
    fn every_format_can_be_named_alone() {
        for format in FORMATS {
            let found = recipes(Some(&strings(&[format])), Some(&strings(&["rtn"]))).expect("a format");
            assert_eq!(found.len(), 1, "{format}");
        }
        let all = recipes(None, None).expect("good names");
        assert!(all.len() > FORMATS.len());
    }

    #[test]
    fn methods_that_are_named_are_taken_for_all() {
        let found = recipes(Some(&strings(&["int8", "nf4"])), Some(&strings(&["gptq"]))).expect("good names");
        assert_eq!(names(&found), ["int8 gptq", "nf4 gptq"]);
    }

    #[test]
    fn wrong_names_say_what_was_expected() {
        let error = format!("{:#}", recipes(Some(&strings(&["int3"])), None).expect_err("no such format"));
        assert!(error.contains("int3") && error.contains("int4-g128, "), "{error}");
        let error = format!("{:#}", recipes(None, Some(&strings(&["magic"]))).expect_err("no such method"));
        assert!(error.contains("magic") && error.contains("gptq"), "{error}");
    }
}
