//! Queries behind addresses of kept responses, read like the fields of a body.

use serde_json::{Map, Value, json};

use super::input::{Item, response_id};
use crate::error::ApiError;
use crate::fields::{self, Count, Fields, Request, Word, Wrong};

/// The query of `GET /v1/responses/{id}`.
pub struct RetrieveQuery;

/// The query of `GET /v1/responses/{id}/input_items`.
pub struct ItemsQuery {
    limit: usize,
    is_ascending: bool,
    after: Option<String>,
}

pub fn read<R: Request<Bounds = ()>>(query: Option<&str>) -> Result<R, ApiError> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name.to_owned(), plain(value))
    };
    let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()).map(pair);
    fields::read(pairs.collect::<Map<_, _>>(), &())
}

/// A value as JSON would have it. No field's value has a character that an address writes in
/// another way.
fn plain(value: &str) -> Value {
    match value {
        "true" => json!(true),
        "false" => json!(false),
        text => text.parse::<i64>().map_or_else(|_| json!(text), |number| json!(number)),
    }
}

impl Request for RetrieveQuery {
    type Bounds = ();

    fn read(fields: &mut Fields, (): &()) -> Result<Self, Wrong> {
        fields.refused("stream", &[json!(false)], "a stored response cannot be streamed")?;
        Ok(Self)
    }
}

impl Request for ItemsQuery {
    type Bounds = ();

    fn read(fields: &mut Fields, (): &()) -> Result<Self, Wrong> {
        let limit = fields.optional("limit", Count::between(1, 100), "Maximum number of items of a page.")?;
        let order = fields.optional("order", Word(&["desc", "asc"]), "Which end comes first.")?;
        let after = fields.optional("after", response_id(), "The item that the page before ended with.")?;
        Ok(Self { limit: limit.unwrap_or(20), is_ascending: order == Some("asc"), after })
    }
}

impl ItemsQuery {
    pub fn page(&self, items: &[Item]) -> Result<Value, ApiError> {
        let mut items: Vec<&Item> = items.iter().collect();
        if !self.is_ascending {
            items.reverse();
        }
        let start = match &self.after {
            None => 0,
            Some(id) => match items.iter().position(|item| *item.id == **id) {
                Some(index) => index + 1,
                None => return Err(ApiError::invalid("after", "must be an item of this response's input")),
            },
        };
        let rest = &items[start..];
        let page = &rest[..rest.len().min(self.limit)];
        let data: Vec<_> = page.iter().map(|item| item.listed()).collect();
        Ok(json!({
            "object": "list", "data": data, "has_more": page.len() < rest.len(),
            "first_id": page.first().map(|item| &item.id), "last_id": page.last().map(|item| &item.id),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other() {
        let items: Vec<Item> = (0..5).map(|n| Item::new(format!("msg_{n}"), "user", n.to_string())).collect();
        let page = |query: &str| {
            let page = read::<ItemsQuery>(Some(query))?.page(&items)?;
            let ids: String = page["data"].as_array().map_or(String::new(), |data| {
                data.iter().map(|item| item["content"][0]["text"].as_str().unwrap_or("?")).collect()
            });
            Ok::<_, ApiError>((ids, page["has_more"] == true))
        };
        assert_eq!(page(""), Ok(("43210".into(), false)));
        assert_eq!(page("order=asc&limit=2"), Ok(("01".into(), true)));
        assert_eq!(page("order=asc&limit=3&after=msg_1"), Ok(("234".into(), false)));
        assert_eq!(page("after=msg_0"), Ok((String::new(), false)));
        for bad in ["after=msg_9", "limit=0", "limit=101", "limit=x", "order=up", "include=x", "limit"] {
            assert!(page(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_kept_response_is_not_streamed() {
        assert!(read::<RetrieveQuery>(None).is_ok() && read::<RetrieveQuery>(Some("stream=false")).is_ok());
        let refused = read::<RetrieveQuery>(Some("stream=true")).map(|_| ()).map_err(|error| error.to_string());
        assert_eq!(refused, Err("stream: a stored response cannot be streamed".into()));
    }
}
