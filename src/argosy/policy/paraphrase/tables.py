"""English words for the guard: those without a meaning, those that must agree, and those that are interchangeable."""

from __future__ import annotations


def _split(words: str) -> frozenset[str]:
    return frozenset(words.split())


STOP_WORDS = _split(
    """
    a an the this that these those there here it its it's itself
    i me my mine myself we us our ours you your yours he him his she her hers they them their theirs someone somebody
    am is are was were be been being do does did done doing have has had having will would shall
    and or of to in on at for about as so than such too also very just
    what what's which how how's that's i'm i'd i'll i've you're we're let let's there's one
    please thanks thank hello hi hey dear kindly
    want wants wanted like tell explain describe show know
    exactly actually really simply briefly basically usually generally currently properly correctly
    way ways step steps method methods procedure process instruction instructions guide
    information info detail details question answer possible
    """
)
"""Words whose addition or omission leaves a question the same."""
FACT_WORDS = _split(
    """
    from with by into onto without before after during while until till since off out up down over under
    above below inside outside
    more less fewer most least much many enough only all every each both either another other others else same
    first last next previous second third final
    if unless because although though whether except instead between against through across per
    now today tomorrow yesterday tonight ago later earlier always sometimes often again still already yet ever
    monday tuesday wednesday thursday friday saturday sunday weekday weekend
    january february march april may june july august september october november december
    spring summer autumn winter morning noon afternoon evening night midnight daily weekly monthly yearly annual
    who whom whose when where why
    """
)
"""Words of time, order, amount, condition and question that both sides must have equally often."""
NEGATIONS = _split(
    """
    not no never none nor neither nobody nothing nowhere cannot without hardly scarcely barely rarely seldom few little
    lack lacks lacking fail fails failed avoid avoids stop stops refuse refuses except
    """
)
"""Words that turn a statement round. A word that ends in n't is one, too."""
OBLIGATIONS = _split("must should ought need needs required obliged mandatory compulsory necessary")
PERMISSIONS = _split("can could may might able allowed permitted optional")
"""Words that ask for a permission where those of `OBLIGATIONS` ask for a duty."""
CLOSED_STARTS = _split(
    """
    am is are isn't aren't was were do does don't doesn't did has have can can't could will would should shall may must
    """
)
"""First words of questions that want a yes or a no."""
HOW_WORDS = _split(
    "how how's way ways step steps method methods procedure process instruction instructions guide"
)
"""Words that ask how something is done, where those of `WHAT_WORDS` ask what it is."""
WHAT_WORDS = _split("what what's which tell explain describe show who whom whose when where why")
FIRST_PERSON = _split("i me my mine myself we us our ours i'm i'd i'll i've we're")
SECOND_PERSON = _split("you your yours yourself you're")
NUMBERS = {
    word: str(value)
    for value, words in enumerate(
        (
            *("zero", "once", "two twice double pair", "three triple", "four", "five", "six"),
            *("seven", "eight", "nine", "ten", "eleven", "twelve dozen", "thirteen", "fourteen"),
            *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
        )
    )
    for word in words.split()
} | {
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "sixty": "60",
    "seventy": "70",
    "eighty": "80",
    "ninety": "90",
    "half": "0.5",
    "hundred": "100",
    "thousand": "1000",
    "million": "1000000",
    "billion": "1000000000",
}
"""Value of a number by its word. `one` is a pronoun too often."""
SYNONYMS = {
    word: f"={number}"
    for number, line in enumerate(
        """
        buy buys bought buying purchase
        begin began begun beginning start commence
        fix repair mend
        large big
        small tiny
        fast quick quickly rapid rapidly
        car automobile
        phone telephone
        movie film
        picture photo photograph image
        child children kid kids
        select choose chose chosen pick
        delete deletion remove removal erase
        make made create creation
        change modify alter
        error mistake
        login logon signin
        logout signout
        email e-mail
        price cost
        bill invoice
        refund reimbursement reimburse
        ship shipping shipment deliver delivery
        store shop
        physician doctor
        illness disease sickness
        medicine medication
        forbid forbidden prohibit ban
        try tried attempt
        reply respond response
        difference differ distinction distinguish
        happen occur
        cancel cancelled cancelling cancellation
        install installation
        configure configuration
        connect connection
        register registration enrol enroll enrollment
        subscribe subscription
        pay paid payment
        recover recovery
        forget forgot forgotten
        height tall
        length long
        depth deep
        width wide
        weight weigh
        distance far
        age old
        invent invention inventor
        author write wrote written
        die died death
        born birth
        locate location
        mean meaning meant define definition
        convert conversion
        go went gone
        eat ate eaten
        take took taken
        send sent
        lose lost losing
        see saw seen
        give gave given
        keep kept
        hold held
        speak spoke spoken
        break broke broken
        drive drove driven
        fly flew flown
        man men
        woman women
        person people
        foot feet
        tooth teeth
        mouse mice
        life lives
        kilogram kilogramme kilo kg
        kilometre kilometer km
        metre meter
        centimetre centimeter cm
        hour hr hrs
        minute min mins
        second sec secs
        percent %
        colour color
        organise organize
        licence license
        centre center
        theatre theater
        travel traveled travelled traveling travelling
        """.strip().splitlines()
    )
    for word in line.split()
}
"""Group of interchangeable words, by word."""
